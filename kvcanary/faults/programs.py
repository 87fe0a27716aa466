"""Random programs on the simulated engine, with at most one fault, and whether oracle and canary agree about them.

A program is a list of small numbers, so that it can be cut down; everything else is drawn from its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.simulated import STYLES, SimulatedEngine, Style, Wrong
from kvcanary.engines.simulated.adapter import SimulatedAdapter
from kvcanary.engines.simulated.requests import Request
from kvcanary.events import Event, OwnershipViolated, ViolationDetected
from kvcanary.faults.injectors import Injection
from kvcanary.faults.simulated_faults import SIMULATED, SimulatedInjector

Finding = ViolationDetected | OwnershipViolated
LOOKS = 2
"""Forwards until changed bytes must be reported, where the scrub sees the whole pool in each: two looks."""


class Call(NamedTuple):
    """One thing that happens: ``what``, and a number from which it takes its details."""

    what: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What happens to an engine.

    Attributes:
        style: how it works.
        seed: of the engine.
        calls: one after the other.
        fault: name of a fault that is planted before call ``at``; "": none.
    """

    style: Style
    seed: int
    calls: tuple[Call, ...]
    fault: str = ""
    at: int = 0

    def __str__(self) -> str:
        calls = " ".join(f"{call.what}:{call.number}" for call in self.calls)
        planted = f", {self.fault} before call {self.at}" if self.fault else ""
        return f"style {self.style.name}, seed {self.seed}{planted}: {calls}"


@dataclass(slots=True)
class Outcome:
    """What came of a program: what is true, and what the canary says."""

    truth: list[Wrong]
    findings: list[Finding]
    injection: Injection | None
    forwards: int
    reads: int
    renewed: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])


# --- making them --------------------------------------------------------------------------------------------

_WEIGHTS = {
    "step": 50,
    "submit": 24,
    "again": 6,
    "preempt": 4,
    "fork": 4,
    "offload": 6,
    "weights": 2,
    "idle": 3,
    "abort": 4,
    "run": 4,
}


def random_program(seed: int, *, faults: Sequence[str] = (), styles: Sequence[Style] = (), length: int = 22) -> Program:
    """A program drawn from ``seed``; ``faults`` are those that it may have, "" for none at all."""
    rng = random.Random(seed)
    style = rng.choice(list(styles or STYLES.values()))
    fitting = [name for name in faults if not name or SIMULATED[name].fits(style)]
    chosen = rng.choice(fitting) if fitting else ""
    calls = [Call("submit", rng.randrange(1 << 20))]
    calls += [Call(what, rng.randrange(1 << 20)) for what in rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=length)]
    return Program(style=style, seed=seed, calls=tuple(calls), fault=chosen, at=rng.randrange(2, length))


# --- running them -------------------------------------------------------------------------------------------


class Inline:
    """A canary on a simulated engine without a thread: events are collected when they are asked for."""

    def __init__(self, engine: SimulatedEngine, config: CanaryConfig) -> None:
        self.canary = Canary(config)
        self.canary.facts.enabled = True
        self._undo = SimulatedAdapter().attach(engine, self.canary)
        started = self.canary.feed.next_run()
        if started is not None:
            self.canary.bus.begin_run(started)

    def collect(self) -> list[Event]:
        """Everything that happened since."""
        self.canary.facts.hurry()
        return self.canary.bus.publish(self.canary.feed.collect())

    def stop(self) -> None:
        """Leave the engine as it was."""
        self._undo()


def run(program: Program, *, config: CanaryConfig | None = None, device: str = "cpu") -> Outcome:
    """Run a program, to the end of all its requests."""
    engine = SimulatedEngine(program.style, seed=program.seed, device=device)
    inline = Inline(engine, config or CanaryConfig(mode="log", key=7, stats_every=0, health_every=0))
    injector = SimulatedInjector(engine, seed=program.seed)
    player = Player(engine)
    findings: list[Finding] = []

    def listen() -> None:
        findings.extend(event for event in inline.collect() if isinstance(event, Finding))

    for number, call in enumerate(program.calls):
        if program.fault and number == program.at:
            injector.plant(program.fault)
        player.do(call)
        if engine.forwards % 16 == 15:
            listen()
    player.end()
    listen()
    injector.undo()
    inline.stop()
    return Outcome(
        truth=engine.truth,
        findings=findings,
        injection=injector.injection,
        forwards=engine.forwards,
        reads=engine.oracle.reads,
        renewed=engine.oracle.renewed,
    )


class Player:
    """Does the calls of a program."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self._texts = [engine.prompt(24) for _ in range(2)]

    def do(self, call: Call) -> None:
        """One call; what does not fit the moment does nothing."""
        engine, number = self.engine, call.number
        running = engine.running[number % len(engine.running)] if engine.running else None
        match call.what:
            case "step":
                engine.step()
            case "submit":
                self._submit(number)
            case "again":
                self._again(number)
            case "weights":
                engine.update_weights()
            case "idle":
                engine.idle()
            case "run":
                engine.device.run()
            case "abort" if self.requests:
                engine.abort(self.requests[number % len(self.requests)])
            case "preempt" if running is not None:
                engine.preempt(running)
            case "fork" if running is not None:
                child = engine.fork(running)
                self.requests += [child] if child is not None else []
            case "offload" if running is not None:
                engine.tier.send(running)
            case _:
                pass

    def end(self) -> None:
        """All requests end, and what they left is judged by two more forwards."""
        engine = self.engine
        engine.step()
        engine.settle()
        for request in self.requests:
            engine.abort(request)
        for _ in range(LOOKS):
            engine.idle()
        engine.device.run()

    def _submit(self, number: int) -> None:
        """A new prompt; half of them begin as others do, some belong to somebody or hold a picture."""
        engine = self.engine
        shared = self._texts[number % 2][: number // 2 % 14] if number // 32 % 2 else []
        prompt = [*shared, *engine.prompt(1 + number // 64 % 9)]
        identity = (b"", b"", b"adapter")[number // 1024 % 3]
        salts = {1: 77 + number // 4096 % 2} if number // 8192 % 4 == 0 and len(prompt) > 2 else None
        self.requests.append(engine.submit(prompt, 1 + number // 65536 % 9, identity=identity, salts=salts))

    def _again(self, number: int) -> None:
        """The next turn of a talk: what was said so far, and more."""
        if self.requests:
            old = self.requests[number % len(self.requests)]
            prompt = [*old.tokens, *self.engine.prompt(1 + number % 5)]
            limit = 2 + number // 64 % 4
            if len(prompt) < 40:
                self.requests.append(
                    self.engine.submit(prompt, limit, identity=old.identity, salts=old.salts)
                )


# --- judging them -------------------------------------------------------------------------------------------


def disagreements(program: Program, outcome: Outcome) -> list[str]:
    """Alarms without a wrong, and wrongs without an alarm in time; none when both agree."""
    found: list[str] = []
    for finding in outcome.findings:
        if not any(_concerns(wrong, finding) and wrong.forward <= finding.forward for wrong in outcome.truth):
            found.append(f"false alarm: {_say(finding)}")
    for wrong in outcome.truth:
        if wrong.certain and not _seen(wrong, outcome):
            found.append(f"missed: {wrong}")
    return found


def _names(finding: Finding) -> set[str]:
    if isinstance(finding, OwnershipViolated):
        return {finding.request, finding.other} - {""}
    return {finding.request, finding.owner_request, finding.writer_request} - {""}


def _concerns(wrong: Wrong, finding: Finding) -> bool:
    same_page = finding.page >= 0 and (wrong.group, wrong.page) == (finding.group, finding.page)
    return same_page or wrong.request in _names(finding)


def _seen(wrong: Wrong, outcome: Outcome) -> bool:
    deadline = wrong.forward + {"content": LOOKS, "owner": 1, "epoch": 1}.get(wrong.kind, 0)
    if wrong.kind == "input":
        deadline = outcome.forwards
    if any(_concerns(wrong, finding) and finding.forward <= deadline for finding in outcome.findings):
        return True
    if wrong.kind == "content":
        between = range(wrong.forward, deadline + 1)
        return any((wrong.group, wrong.slot, forward) in outcome.renewed for forward in between)
    return False


def _say(finding: Finding) -> str:
    where = f"{finding.group} page {finding.page} of {finding.request or 'nobody'} in forward {finding.forward}"
    return f"{finding.kind}: {where}"


# --- many of them -------------------------------------------------------------------------------------------


def shrink(program: Program, fails: Callable[[Program], bool], *, tries: int = 400) -> Program:
    """The shortest program found that still fails: calls are taken out as long as it does."""
    size = max(1, len(program.calls) // 2)
    while size and tries:
        for start in range(0, len(program.calls), size):
            calls = program.calls[:start] + program.calls[start + size :]
            gone = min(size, max(0, program.at - start))
            shorter = replace(program, calls=calls, at=max(0, program.at - gone))
            tries -= 1
            if calls and fails(shorter):
                program = shorter
                break
            if not tries:
                break
        else:
            size //= 2
    return program


def search(seeds: Iterable[int], faults: Sequence[str], told: Callable[[int], None] = lambda _: None) -> list[str]:
    """Run a program for each seed; what is returned are disagreements, each with the shortest program that shows it."""
    problems: list[str] = []
    for count, seed in enumerate(seeds, 1):
        program = random_program(seed, faults=faults)
        if disagreements(program, run(program)):
            short = shrink(program, lambda one: bool(disagreements(one, run(one))))
            problems.append(f"{short}\n    " + "\n    ".join(disagreements(short, run(short))))
        told(count)
    return problems
