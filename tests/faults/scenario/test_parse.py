from __future__ import annotations

from pathlib import Path

import pytest

from kvcanary.faults.scenario.parse import ScenarioError, load

GOOD = """\
summary = "A page is freed twice."
groups = [{ slots = 8 }]

events = [
    "alloc(A, 3)", # a page
    "free(3)",
    "free(3)",
]
expect = [{ kind = "DOUBLE_FREE", at = "free(3)", nth = 2 }]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "case.toml"
    path.write_text(text, "utf-8")
    return path


def test_an_expectation_is_tied_to_its_event_and_events_to_their_lines(tmp_path: Path) -> None:
    scenario = load(written(tmp_path, GOOD))
    assert [want.event for want in scenario.wants] == [2]
    assert scenario.play.lines == (5, 6, 7)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("free(3)", "fre(3)", 6, "no event is called 'fre' [(]did you mean 'free'"),
        ("slots = 8", "slot = 8", 2, "no field is called 'slot' [(]did you mean 'slots'[?][)]; fields are slots, name"),
        ("slots = 8", "slots = 0", 2, "slots: Expected `int` >= 1, got 0"),
        ("slots = 8", 'slots = 8, name = "h"', 2, "a group cannot be called 'h'"),
        ("summary", "sumary", 1, "no field is called 'sumary' [(]did you mean 'summary'"),
        ("groups = [{ slots = 8 }]", "", 1, "missing required field `groups`"),
        ("groups = [{ slots = 8 }]", "groups = []", 2, "groups: Expected `array` of length >= 1"),
        ("groups = [{ slots = 8 }]", "groups = [{ slots = 8 }, { slots = 4 }]", 2, "two groups are called 'full'"),
        ("DOUBLE_FREE", "DUOBLE_FREE", 9, "no finding is called 'DUOBLE_FREE' [(]did you mean 'DOUBLE_FREE'"),
        ('at = "free(3)"', 'at = "free(4)"', 9, r"no event begins with 'free\(4\)' [(]did you mean 'free\(3\)'"),
        ('at = "free(3)"', 'at = ""', 9, "several events begin with ''"),
        ("nth = 2", "nth = 3", 9, r"nth = 3, but there are 2 events 'free\(3\)'"),
        ("nth = 2", "nht = 2", 9, "no field is called 'nht' [(]did you mean 'nth'"),
        ("groups", "tiers = { r = 4 }\ngroups", 2, "a tier is one small letter other than r"),
        ("groups", 'requests.B = { like = "C" }\ngroups', 2, "like = 'C': no event has such a request"),
        ("groups", 'why = "because"\ngroups', 2, 'needs expect = "nothing"'),
        ("groups", 'also = ["CONTNET"]\ngroups', 2, "no finding is called 'CONTNET' [(]did you mean 'CONTENT'"),
        ("groups = [", "groups = ", 2, "no valid TOML"),
        ('"free(3)",\n', '"free(3)"\n', 6, "no valid TOML: a comma is missing at the end of this line"),
        ('3)", # a', '3)" # a', 5, "no valid TOML: a comma is missing at the end of this line"),
        ("[{ kind", '"nohting" #', 9, r"expected \"nothing\", or a list of findings .* [(]did you mean 'nothing'"),
        ("[{ kind", '["DOUBLE_FREE"] #', 9, "expect.0: expected .* a list of findings .*, got 'DOUBLE_FREE'"),
        ('at = "free(3)", ', "", 9, "expect.0: Object missing required field `at`"),
        ("nth = 2", 'nth = 2, request = "B"', 9, "no event names the request 'B'"),
        ("nth = 2", 'nth = 2, group = "ful"', 9, "no group or tier is called 'ful' [(]did you mean 'full'"),
        ("groups", "requests.Al = { prompt = 1 }\ngroups", 2, "no event names the request 'Al' [(]did you mean 'A'"),
    ],
)
def test_an_error_names_file_line_and_what_would_be_right(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ScenarioError, match=says) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_an_event_of_the_twin_is_found_on_its_own_line(tmp_path: Path) -> None:
    text = GOOD + '\n[twin]\nevents = [\n    "alloc(A, 3)",\n    "fre(3)",\n]\n'
    with pytest.raises(ScenarioError, match=r"case.toml:14: no event is called 'fre'"):
        load(written(tmp_path, text))


def test_several_events_on_one_line_share_it(tmp_path: Path) -> None:
    text = GOOD.replace('    "alloc(A, 3)", # a page\n    "free(3)",\n', '    "alloc(A, 3)", "free(3)", # "no event"\n')
    assert load(written(tmp_path, text)).play.lines == (5, 5, 6)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"absent.toml: cannot be read"):
        load(tmp_path / "absent.toml")
