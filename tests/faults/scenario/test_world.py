"""What cannot happen in a scenario's world is an error at its line; what can, happens where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcanary.faults.scenario.parse import Scenario, ScenarioError, load
from kvcanary.faults.scenario.play import play
from kvcanary.faults.scenario.verdict import judge

HEAD = 'summary = "s"\nexpect = "nothing"\n'


def scenario(folder: Path, *events: str, groups: str = "{ slots = 16 }", more: str = "") -> Scenario:
    listed = "\n".join(f"    {event!r}," for event in events)
    path = folder / "case.toml"
    path.write_text(f"{HEAD}groups = [{groups}]\n{more}\nevents = [\n{listed}\n]\n", "utf-8")
    return load(path)


def found(given: Scenario) -> list[tuple[str, str]]:
    report = play(given, given.play)
    return [(finding.kind, given.play.events[finding.event].text) for finding in report.findings]


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (["finish(A)"], "no request 'A' is live; those that are: none"),
        (["launch F1(A writes 3)", "launch F1(A writes 4)"], "there is a forward F1 already"),
        (["launch F1(A)"], "request 'A' has no slots; use alloc or hit before"),
        (["alloc(A, 3)", "launch F1(A reads swa:3)"], "no group is called 'swa'; the pool has full"),
        (["alloc(A, r3)"], "the file has no `remote` groups"),
        (["admit(r.A)"], "the file has no `remote` groups"),
        (["alloc(A, 3)", "retire F1"], "no forward F1 was launched; launched were none"),
        (["alloc(A, 3)", "table(A, 4)"], "no launched forward has a row of request 'A'"),
        (["alloc(A, 14..17)"], "slot 16 lies outside of group 'full' with its 16 slots"),
        (["free(99)"], "slot 99 lies outside of group 'full' with its 16 slots"),
        (["alloc(A, h4)"], "tier 'h' has 4 blocks, and no h4"),
        (["alloc(A, x0)"], r"the file has no tier 'x'; its blocks need a line like tiers = \{ x = 4 \}"),
        (["alloc(A, 3 3)"], "slot 3 of group 'full' is named twice"),
        (["alloc(A, 0..7)", "launch F1(A writes 0..7)", "rewind(A, 99)"], "cannot go back to 99: it has 8 tokens"),
        (
            ["alloc(A, 3)", "launch F1(A writes 3) part traget"],
            "no source is of part 'traget' [(]did you mean 'target'",
        ),
        (["hit(A, key)"], "the prefix index has no key 'key'; it has none"),
        (["copy_land X"], "no copy 'X' was started; started were none"),
        (["alloc(A, 3)", "copy_start X(3 -> h9)"], "tier 'h' has 4 blocks, and no h9"),
        (["alloc(A, 3)", "copy_start X(3 -> h0 h1)"], "1 pages or blocks go to 2"),
        (["alloc(A, 3)", "copy_start X(3 -> h0) only scale"], "there is no source 'scale' to copy; there are k, v"),
        (["alloc(A, 3)", "copy_start X(3 -> h0)", "copy_start X(3 -> h1)"], "copy 'X' is still under way"),
        (["alloc(A, 3)", "copy_start X(3 -> h0)", "copy_land X(scale)"], "nothing of copy 'X' is left to land there"),
        (["scramble(h0)"], "nothing was ever stored in h0"),
        (["flip(3, scale)"], "group 'full' has no source 'scale'; it has k, v"),
        (["flip(99)"], "slot 99 lies outside of group 'full' with its 16 slots"),
        (["alloc(A, 3)", "launch F1(A writes 3 only scale)"], "group 'full' has no source 'scale'"),
        (["free(h0 3)"], "blocks of a tier and other places do not go together"),
        (["move(3 -> 4 5)"], "a move needs as many targets as sources"),
        (["translate(3 -> 4)"], "translate takes full slots"),
    ],
)
def test_what_cannot_happen_is_an_error_at_its_line(tmp_path: Path, events: list[str], says: str) -> None:
    given = scenario(tmp_path, *events, more="tiers = { h = 4 }")
    with pytest.raises(ScenarioError, match=says) as caught:
        play(given, given.play)
    assert str(caught.value).startswith(f"{tmp_path / 'case.toml'}:{5 + len(events)}: {events[-1]!r}: ")


def test_slots_that_fill_no_pages_are_no_allotment(tmp_path: Path) -> None:
    given = scenario(tmp_path, "alloc(A, 3..5)", groups="{ slots = 16, page = 4 }")
    with pytest.raises(ScenarioError, match=r"handed out in pages of 4 slots; these 3 fill no pages"):
        play(given, given.play)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("{ slots = 15, page = 4 }", "15 slots fill no whole pages of 4"),
        ("{ slots = 16, null = [99] }", "reserved page 99 lies outside"),
    ],
)
def test_groups_that_make_no_pool_are_an_error_at_their_line(tmp_path: Path, groups: str, says: str) -> None:
    given = scenario(tmp_path, "idle", groups=groups)
    with pytest.raises(ScenarioError, match=rf"case.toml:3: there is no such world: .*{says}"):
        play(given, given.play)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            "settings.ring_capcity = 3",
            r"case.toml:4: no setting is called 'ring_capcity' [(]did you mean 'ring_capacity'",
        ),
        ('settings.mode = "raise"', "a scenario does not choose 'mode'"),
        ("settings.snapshots = 0", "case.toml:4: snapshots"),
        ('requests.A.media = { "x" = "picture" }', "case.toml:4: media stands at positions such as"),
        ('requests.A.like = "B"\nrequests.B.like = "A"', "like one another in a circle: A -> B -> A"),
    ],
)
def test_what_a_file_says_of_settings_and_requests_is_checked(tmp_path: Path, more: str, says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        scenario(tmp_path, "alloc(A, 3)", more=more)


def test_a_forward_that_is_retired_later_waits_and_so_does_what_is_behind_it(tmp_path: Path) -> None:
    events = ["alloc(A, 0..3)", "launch F1(A writes 0..1)", "launch F2(A writes 2 nan)", "retire F1", "idle"]
    assert found(scenario(tmp_path, *events)) == [("NONFINITE", "retire F1")]


def test_one_stream_runs_in_order(tmp_path: Path) -> None:
    events = ["alloc(A, 0..3)", "launch F1(A writes 0)", "launch F2(A)", "run F2", "run F1"]
    given = scenario(tmp_path, *events)
    with pytest.raises(ScenarioError, match="'run F2': forward F2 waits behind forward F1"):
        play(given, given.play)


def test_a_call_that_the_canary_refuses_is_a_finding(tmp_path: Path) -> None:
    given = scenario(tmp_path, *[f"admit(A{number})" for number in range(33)], "alloc(A3, 3)", "launch F1(A3 writes 3)")
    assert found(given) == [("BatchError", "admit(A32)")]


def test_a_copy_that_is_told_too_early_carries_the_bytes_that_are_there(tmp_path: Path) -> None:
    events = [
        "alloc(A, 0)",
        "launch F1(A writes 0)",
        "copy_start X(0 -> h0)",
        "copy_land X",
        "admit(B, 1)",
        "alloc(B, 4..7)",
        "copy_start Y(h0 -> 4) for B",
        "copy_done Y",
        "launch F2(B reads 4, writes 5)",
        "launch F3(B)",
        "copy_land Y",
        "launch F4(B)",
        "launch F5(B)",
    ]
    given = scenario(tmp_path, *events, more='tiers = { h = 4 }\nrequests.B = { like = "A" }')
    assert found(given) == [("CONTENT", "launch F3(B)")]


def test_the_same_file_gives_the_same_findings(tmp_path: Path) -> None:
    events = ["alloc(A, 0..7)", "launch F1(A writes 0..5)", "flip(3)", "launch F2(A)", "launch F3(A)"]
    given = scenario(tmp_path, *events)
    first, again = play(given, given.play), play(given, given.play)
    assert [finding.place for finding in first.findings] == [finding.place for finding in again.findings] == ["slot 3"]


def test_a_finding_that_nobody_expects_fails_the_file(tmp_path: Path) -> None:
    given = scenario(tmp_path, "alloc(A, 3)", "free(3)", "free(3)")
    (verdict,) = judge(given)
    assert verdict.outcome == "failed"
    assert verdict.problems[0].startswith("line 8, 'free(3)': DOUBLE_FREE: request A")
