from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcanary.cli import main

HOLDS = """\
case = "owner/repository#1"
summary = "A page is freed twice."
groups = [{ slots = 8 }]
events = [
    "alloc(A, 3)",
    "free(3)",
    "free(3)",
]
expect = [{ kind = "DOUBLE_FREE", at = "free(3)", nth = 2 }]

[twin]
events = ["alloc(A, 3)", "free(3)"]
"""
MISSED = HOLDS.replace('kind = "DOUBLE_FREE"', 'kind = "EARLY_REUSE"')
FALSE_ALARM = HOLDS.replace('["alloc(A, 3)", "free(3)"]', '["alloc(A, 3)", "free(3)", "free(3)"]')
UNSEEN = HOLDS.partition("expect")[0].replace('    "free(3)",\n', "", 1) + 'expect = "nothing"\nwhy = "nobody can"\n'
BROKEN = HOLDS.replace('"free(3)",', '"fre(3)",', 1)
IMPOSSIBLE = HOLDS.replace('"free(3)",', '"evict(key)", "free(3)",', 1)


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text, "utf-8")
    return folder


def played(folder: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["simulate", str(folder), *options])
    return status, " ".join(capsys.readouterr().out.split())


def test_files_that_hold_are_a_table_and_exit_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = played(written(tmp_path, one=HOLDS, two=UNSEEN), capsys=capsys)
    assert status == 0
    assert "one.toml DOUBLE_FREE DOUBLE_FREE caught, twin silent" in printed
    assert "two.toml nothing nothing unseen" in printed
    assert "2 files: 1 caught, 1 silent, 1 unseen, as the files say" in printed


def test_what_came_instead_is_shown_with_its_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = played(written(tmp_path, one=MISSED), capsys=capsys)
    assert status == 1
    assert "one.toml: owner/repository#1" in printed
    assert "line 7, 'free(3)': no EARLY_REUSE" in printed
    assert "at 'free(3)': DOUBLE_FREE: request A, full page 3" in printed


def test_a_false_alarm_in_the_twin_fails_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = played(written(tmp_path, one=FALSE_ALARM), capsys=capsys)
    assert status == 1
    assert "caught, twin FAILED" in printed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BROKEN, "one.toml:6: no event is called 'fre'"),
        (IMPOSSIBLE, "one.toml:6: 'evict(key)': the prefix index has no key 'key'"),
    ],
)
def test_a_file_that_is_no_scenario_is_status_2_and_the_others_are_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    status, printed = played(written(tmp_path, one=text, two=HOLDS), "--json", capsys=capsys)
    assert status == 2
    report = json.loads(printed)
    assert [row["outcome"] for row in report["scenarios"]] == ["error", "caught", "silent"]
    assert says in report["scenarios"][0]["problems"][0]


def test_json_tells_what_was_expected_and_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = played(written(tmp_path, one=HOLDS), "--json", capsys=capsys)
    report = json.loads(printed)
    assert status == 0
    assert report["passed"]
    row = report["scenarios"][0]
    assert (row["case"], row["twin"], row["outcome"]) == ("owner/repository#1", False, "caught")
    assert row["expected"][0]["kind"] == "DOUBLE_FREE"
    assert (row["found"][0]["kind"], row["found"][0]["line"], row["found"][0]["at"]) == ("DOUBLE_FREE", 7, "free(3)")


def test_verbose_shows_what_the_canary_told_at_each_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, printed = played(written(tmp_path, one=HOLDS), "--verbose", capsys=capsys)
    assert "alloc(A, 3) run.started" in printed
    assert "free(3) pages.freed forward=1 group=full" in printed
    _, printed = played(tmp_path, "--verbose", "--json", capsys=capsys)
    told = [one["type"] for one in json.loads(printed)["scenarios"][0]["trace"][2]["told"]]
    assert told[:2] == ["pages.freed", "ownership.violated"]


def test_a_folder_without_scenarios_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path)]) == 2
    assert f"no scenario files (*.toml) found in {tmp_path}" in capsys.readouterr().err


def test_no_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "name files or folders" in capsys.readouterr().err


def test_a_path_that_does_not_exist_is_an_error_and_the_others_are_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = played(written(tmp_path, one=HOLDS), str(tmp_path / "absent.toml"), "--json", capsys=capsys)
    assert status == 2
    rows = json.loads(printed)["scenarios"]
    assert [row["outcome"] for row in rows] == ["caught", "silent", "error"]
    assert rows[2]["problems"] == [f"{tmp_path / 'absent.toml'}: there is no such file or folder"]


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    assert "kvcanary simulate case.toml --verbose" in capsys.readouterr().out


def test_the_kernels_of_a_gpu_are_interpreted_where_there_is_none(tmp_path: Path) -> None:
    text = HOLDS.replace('"free(3)",\n]', '"free(3)",\n    "alloc(B, 3)",\n    "launch F1(B writes 3 nan)",\n]', 1)
    text = text.replace("nth = 2 }", 'nth = 2 }, { kind = "NONFINITE", at = "launch F1", request = "B" }')
    written(tmp_path, one=text)
    # In a process of its own: whether Triton is interpreted is settled when its kernels are first imported.
    program = "import sys; from kvcanary.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "simulate", tmp_path, "--backend", "triton", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["scenarios"][0]["found"]
    assert [finding["kind"] for finding in found] == ["DOUBLE_FREE", "NONFINITE"]
