"""Whether what was reported is what a scenario says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
        problems: what came instead of what was expected; none if it holds.
    """

    scenario: Scenario
    is_twin: bool
    outcome: Outcome
    problems: tuple[str, ...]
    report: Report

    @property
    def holds(self) -> bool:
        """Whether it came as the file says."""
        return self.outcome != "failed"

    @property
    def play(self) -> Play:
        """What was played."""
        twin = self.scenario.twin
        return twin if self.is_twin and twin is not None else self.scenario.play


def judge(scenario: Scenario, *, backend: Backend = "reference") -> list[Verdict]:
    """Play a scenario and its twin.

    Raises:
        ScenarioError: an event cannot happen, with its line.
    """
    verdicts = [_verdict(scenario, play(scenario, scenario.play, backend=backend))]
    if scenario.twin is not None:
        report = play(scenario, scenario.twin, backend=backend)
        problems = tuple(_unexpected(scenario.twin, finding) for finding in report.findings)
        verdicts.append(Verdict(scenario, is_twin=True, outcome=_silence(problems), problems=problems, report=report))
    return verdicts


def _silence(problems: Sequence[str]) -> Outcome:
    return "failed" if problems else "silent"


def _verdict(scenario: Scenario, report: Report) -> Verdict:
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
    problems += [_unexpected(scenario.play, finding) for finding in extra]
    outcome: Outcome = "caught" if scenario.wants else "unseen" if scenario.document.why else "silent"
    return Verdict(
        scenario, is_twin=False, outcome="failed" if problems else outcome, problems=tuple(problems), report=report
    )


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
    return f"{finding.kind}: {', '.join([*parties, *where])}{words}"
