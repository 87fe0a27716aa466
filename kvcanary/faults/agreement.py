"""Whether oracle and canary agree about a program of the simulated engine, and the shortest one where they do not.

They agree when every finding is about something that was wrong by then, and everything wrong is found by the forward
in which it can be known: at once, but for bytes (after two looks), for tokens that the scheduler does not know yet, and
for writes that went nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvcanary.engines.simulated import Wrong
from kvcanary.events import OwnershipViolated
from kvcanary.faults.programs import LOOKS, Finding, Outcome, Program, random_program, run


def disagreements(outcome: Outcome) -> list[str]:
    """Alarms without a wrong, and wrongs without an alarm in time; none when both agree."""
    false = [
        f"false alarm: {_say(finding)}"
        for finding in outcome.findings
        if not any(concerns(wrong, finding) and wrong.forward <= finding.forward for wrong in outcome.truth)
    ]
    return false + [f"missed: {wrong}" for wrong in outcome.truth if not _seen(wrong, outcome)]


def names_of(finding: Finding) -> set[str]:
    """The requests that a finding names."""
    if isinstance(finding, OwnershipViolated):
        return {finding.request, finding.other} - {""}
    return {finding.request, finding.owner_request, finding.writer_request} - {""}


def concerns(wrong: Wrong, finding: Finding) -> bool:
    """Whether a finding is about the page of something wrong, or about a request that did it or suffers."""
    runs = finding.page_runs if isinstance(finding, OwnershipViolated) else ((finding.page, 1),)
    same = wrong.group == finding.group and any(first <= wrong.page < first + count for first, count in runs)
    names = names_of(finding)
    return (same and wrong.page >= 0) or wrong.request in names or wrong.author in names


def _seen(wrong: Wrong, outcome: Outcome) -> bool:
    """Whether somebody said so in time, or nobody could."""
    due = deadline(wrong, outcome)
    return due is None or _told(wrong, outcome, due) or _told_before(wrong, outcome)


def _told(wrong: Wrong, outcome: Outcome, due: int) -> bool:
    return any(concerns(wrong, one) and one.forward <= due for one in outcome.findings)


def _told_before(wrong: Wrong, outcome: Outcome) -> bool:
    """Whether it is a repeat: a broken link is told once a slot, whoever comes by the same wrong way later."""
    links = [one for one in outcome.findings if one.kind == "DIGEST"]
    earlier = [
        other
        for other in outcome.truth
        if (other.group, other.slot, other.kind) == (wrong.group, wrong.slot, "read")
        and other.forward < wrong.forward
        and other.found == wrong.found
    ]
    return any(concerns(other, link) and link.forward < wrong.forward for other in earlier for link in links)


def deadline(wrong: Wrong, outcome: Outcome) -> int | None:
    """The forward by which it must be reported; None: it need not be."""
    turns = [turn for turn in outcome.ran.get(wrong.request, ()) if turn[0] > wrong.forward]
    again = any(start <= wrong.position for _, start in turns)  # one that starts over writes the token again
    match wrong.due:
        case "never":
            return None
        case "next":
            return turns[0][0] if turns and not again else None
        case "end":
            # The token after the last that counts is fed for nothing, before anybody knows that it was the last.
            used = wrong.position < outcome.lengths.get(wrong.request, 0) - 1
            # Once it is admitted anew, its base vouches for all that it was fed; what lies in its pages is read then.
            anew = any(forward > wrong.forward for forward in outcome.begun.get(wrong.request, ()))
            return outcome.forwards if used and not again and not anew else None
        case "now":
            due = wrong.forward + {"content": LOOKS, "owner": 1, "epoch": 1}.get(wrong.kind, 0)
            looks = range(wrong.forward, due + 1) if wrong.kind == "content" else ()
            gone = any((wrong.group, wrong.slot, one) in outcome.renewed for one in looks)
            return None if gone else due


def _say(finding: Finding) -> str:
    where = f"{finding.group} page {finding.page} of {finding.request or 'nobody'} in forward {finding.forward}"
    return f"{finding.kind}: {where}"


# --- many programs ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Search:
    """What came of many programs.

    Attributes:
        programs, forwards, reads: how many were run, and judged by the oracle.
        harmed: programs in which a fault did harm, by its name.
        problems: one text for each program about which oracle and canary disagree.
    """

    programs: int = 0
    forwards: int = 0
    reads: int = 0
    harmed: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])


def search(
    seeds: Iterable[int], faults: Sequence[str], *, length: int = 22, told: Callable[[Search], object] = lambda _: None
) -> Search:
    """Run a program for each seed; ``faults`` are those that they may have, "" for none. ``told`` after each."""
    found = Search()
    for seed in seeds:
        program = random_program(seed, faults=faults, length=length, odd=True)
        outcome = run(program)
        found.programs += 1
        found.forwards += outcome.forwards
        found.reads += outcome.reads
        if program.fault and any(wrong.due != "never" for wrong in outcome.truth):
            found.harmed[program.fault] += 1
        if disagreements(outcome):
            short = shrink(program, lambda one: bool(disagreements(run(one))))
            found.problems.append("\n    ".join([str(short), *disagreements(run(short))]))
        told(found)
    return found


def shrink(program: Program, fails: Callable[[Program], bool], *, tries: int = 400) -> Program:
    """The shortest program found that still fails: calls are taken out as long as it does."""
    size = max(1, len(program.calls) // 2)
    while size and tries > 0:
        for start in range(0, len(program.calls), size):
            shorter = _without(program, start, size)
            tries -= 1
            if shorter.calls and fails(shorter):
                program = shorter
                break
        else:
            size //= 2
    return program


def _without(program: Program, start: int, size: int) -> Program:
    calls = program.calls[:start] + program.calls[start + size :]
    before = max(0, min(size, program.at - start))
    return replace(program, calls=calls, at=program.at - before)
