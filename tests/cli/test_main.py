from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import kvcanary
from kvcanary.cli import COMMANDS, EXTRAS, main


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_or_with_help_it_lists_commands_and_examples(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    assert "kvcanary demo --json" in printed


def test_version_prints_the_version_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == kvcanary.__version__


def test_an_unknown_command_is_a_usage_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demonstrate"]) == 2
    printed = capsys.readouterr()
    assert "demonstrate" in printed.out + printed.err


@pytest.mark.parametrize("module", ["cyclopts", "rich"])
def test_without_the_cli_extra_the_error_says_how_to_install_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["--version"]) == 2
    assert f"{module!r} is needed and not installed: pip install 'kvcanary[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "extra"), sorted(EXTRAS.items()))
def test_a_command_that_lacks_a_module_names_the_extra(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcanary.cli._run", lambda _arguments: importlib.import_module(module))
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo"]) == 2
    assert f"pip install 'kvcanary[{extra}]'" in capsys.readouterr().err


def test_an_import_that_no_extra_explains_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary.cli._run", lambda _arguments: importlib.import_module("kvcanary.no_such_module"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["demo"])


def test_a_wrong_setting_is_reported_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_arguments: list[str]) -> int:
        raise kvcanary.ConfigError("mode must be log, got 'loud'")

    monkeypatch.setattr("kvcanary.cli._run", refuse)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "kvcanary: mode must be log, got 'loud'\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_documented_function_of_its_module(name: str) -> None:
    command = getattr(importlib.import_module(f"kvcanary.cli.{name}"), name)
    assert inspect.getdoc(command)


def test_listing_the_commands_does_not_load_torch() -> None:
    program = "import sys; from kvcanary.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_a_reader_that_goes_away_early_gets_no_traceback() -> None:
    program = "import sys; from kvcanary.cli import main; sys.exit(main(['bench', '--list']))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as told:
        assert told.stdout is not None
        assert told.stderr is not None
        told.stdout.close()
        assert told.stderr.read() == b""
    assert told.returncode == 141


def test_the_package_itself_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcanary", "--version"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, kvcanary.__version__)
