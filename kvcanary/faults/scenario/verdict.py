"""Whether what was reported is what a scenario says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from kvcanary.faults.scenario.happenings import Idle
from kvcanary.faults.scenario.parse import Expected, Play, Scenario, Want
from kvcanary.faults.scenario.play import Finding, Report, play
from kvcanary.faults.scenario.pool import Backend

Outcome = Literal["caught", "silent", "unseen", "failed"]
"""``caught``: all that was expected came, and nothing else; ``silent``: nothing is wrong, and nothing was reported;
``unseen``: something is wrong that nobody can see, and nothing was reported; ``failed``: anything else."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a scenario, or of its twin.

    Attributes:
        play: what was played.
        problems: what came instead of what was expected; none if it holds.
    """

    scenario: Scenario
    play: Play
    is_twin: bool
    outcome: Outcome
    problems: tuple[str, ...]
    report: Report

    @property
    def holds(self) -> bool:
        """Whether it came as the file says."""
        return self.outcome != "failed"


def judge(scenario: Scenario, *, backend: Backend = "reference") -> list[Verdict]:
    """Play a scenario and its twin.

    Raises:
        ScenarioError: an event cannot happen, with its line.
    """
    events = scenario.play if scenario.wants else watched_on(scenario.play)
    verdicts = [_verdict(scenario, events, play(scenario, events, backend=backend))]
    if scenario.twin is not None:
        twin = watched_on(scenario.twin)
        report = play(scenario, twin, backend=backend)
        problems = tuple(_unexpected(twin, finding) for finding in report.findings)
        outcome: Outcome = "failed" if problems else "silent"
        verdicts.append(Verdict(scenario, twin, is_twin=True, outcome=outcome, problems=problems, report=report))
    return verdicts


def watched_on(events: Play) -> Play:
    """The play and two idle forwards after it: what is to stay silent must do so at the second look, too."""
    rest = (Idle(text="idle (afterwards)"),) * 2
    return replace(events, events=(*events.events, *rest), lines=(*events.lines, *events.lines[-1:] * 2))


def _verdict(scenario: Scenario, events: Play, report: Report) -> Verdict:
    left = list(report.findings)
    missing: list[Want] = []
    for want in scenario.wants:
        found = next((one for one in left if one.event == want.event and fits(want.expected, one)), None)
        if found is None:
            missing.append(want)
        else:
            left.remove(found)
    also = (*scenario.document.also, *(want.expected.kind for want in scenario.wants if want not in missing))
    extra = [finding for finding in left if not _follows(scenario, finding, also)]
    problems = [_missing(scenario, want) for want in missing]
    problems += [_unexpected(events, finding) for finding in extra]
    outcome: Outcome = "caught" if scenario.wants else "unseen" if scenario.document.why else "silent"
    outcome = "failed" if problems else outcome
    return Verdict(scenario, events, is_twin=False, outcome=outcome, problems=tuple(problems), report=report)


def _follows(scenario: Scenario, finding: Finding, also: Sequence[str]) -> bool:
    """Whether a finding is of a kind that may follow, and comes no earlier than the first expected one."""
    first = min((want.event for want in scenario.wants), default=0)
    return finding.kind in also and finding.event >= first


def fits(expected: Expected, finding: Finding) -> bool:
    """Whether a finding is the expected one; what is not said may be anything."""
    return (
        expected.kind == finding.kind
        and expected.request in {"", finding.request}
        and expected.group in {"", finding.group}
        and (not expected.other or expected.other in finding.others)
    )


def _missing(scenario: Scenario, want: Want) -> str:
    expected = want.expected
    parties = [f"of request {expected.request}"] if expected.request else []
    parties += [f"with {expected.other}"] if expected.other else []
    parties += [f"in group {expected.group}"] if expected.group else []
    return f"line {scenario.play.lines[want.event]}, {expected.at!r}: no {' '.join([expected.kind, *parties])}"


def _unexpected(play_: Play, finding: Finding) -> str:
    text = play_.events[finding.event].text
    return f"line {play_.lines[finding.event]}, {text!r}: {described(finding)}"


def described(finding: Finding) -> str:
    """A finding in one line."""
    parties = [f"request {finding.request}"] if finding.request else []
    parties += [f"with {' and '.join(finding.others)}"] if finding.others else []
    where = [f"{finding.group} {finding.place}".strip()] if finding.place or finding.group else []
    words = f" ({finding.detail})" if finding.detail else ""
    return ": ".join(filter(None, [finding.kind, ", ".join([*parties, *where])])) + words
