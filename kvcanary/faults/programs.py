"""Random programs on the simulated engine, with at most one fault.

A program is a list of words and numbers, so that it can be cut down; everything else is drawn from its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.simulated import STYLES, SimulatedAdapter, SimulatedEngine, Style, Wrong
from kvcanary.engines.simulated.rearranging import deduplicate, defragment
from kvcanary.engines.simulated.requests import Request
from kvcanary.engines.simulated.style import Sliding
from kvcanary.errors import ConfigError
from kvcanary.events import Event, OwnershipViolated, ViolationDetected
from kvcanary.faults.injectors import Injection
from kvcanary.faults.simulated_faults import SIMULATED, SimulatedInjector
from kvcanary.state import PoisonMode

Finding = ViolationDetected | OwnershipViolated
LONGEST = 40
"""Tokens of a prompt."""
LOOKS = 2
"""Forwards until changed bytes are reported, where the scrub sees the whole pool in each."""


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
        poison: the canary's setting.
    """

    style: Style
    seed: int
    calls: tuple[Call, ...]
    fault: str = ""
    at: int = 0
    poison: PoisonMode = "off"

    def __str__(self) -> str:
        calls = " ".join(f"{call.what}:{call.number}" for call in self.calls)
        style = self.style.name or str(self.style)
        poison = f", poison {self.poison}" if self.poison != "off" else ""
        planted = f", {self.fault} before call {self.at}" if self.fault else ""
        return f"style {style}, seed {self.seed}{poison}{planted}: {calls}"


@dataclass(slots=True)
class Outcome:
    """What came of a program: what is true, and what the canary says."""

    truth: list[Wrong]
    findings: list[Finding]
    injection: Injection | None
    forwards: int
    reads: int
    renewed: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    ran: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    begun: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    lengths: dict[str, int] = field(default_factory=dict[str, int])


# --- making them --------------------------------------------------------------------------------------------

_SLIDING: tuple[Sliding, ...] = ("", "", "ring", "translated", "null")
_POISON: tuple[PoisonMode, ...] = ("off", "off", "sample", "full")
_WEIGHTS = {
    "step": 50,
    "submit": 24,
    "again": 6,
    "alike": 4,
    "preempt": 4,
    "fork": 4,
    "defragment": 3,
    "deduplicate": 3,
    "offload": 6,
    "weights": 2,
    "idle": 3,
    "abort": 4,
    "run": 4,
}


def random_style(rng: random.Random) -> Style:
    """A style that is none of the named ones: odd sizes of pages, windows, rings, chunks; more forwards in flight."""
    while True:
        sliding = rng.choice(_SLIDING)
        drafts = rng.choice((0, 0, 1, 3))
        page_size = rng.choice((1, 2, 3, 4, 8, 16))
        try:
            return Style(
                name="",
                pages=rng.choice((12, 24, 64)) if page_size > 2 else 96,
                page_size=page_size,
                slot_tables=sliding == "translated" or rng.random() < 0.3,
                sliding=sliding,
                window=rng.randint(2, 14),
                depth=0 if drafts else rng.randrange(4),
                chunk=rng.randint(1, 9),
                rows=rng.randint(1, 6),
                drafts=drafts,
                draft_layer=sliding != "ring" and rng.random() < 0.2,
                cache=sliding in {"", "null"} and rng.random() < 0.8,
                padding=rng.choice((0, 0, 1, 3)),
                tells_rewinds=rng.random() < 0.5,
            )
        except ConfigError:
            continue  # too few pages


def random_program(
    seed: int, *, faults: Sequence[str] = (), styles: Sequence[Style] = (), length: int = 22, odd: bool = False
) -> Program:
    """A program drawn from ``seed``; ``faults`` are those that it may have, "" for none at all.

    ``odd``: half of all styles are random ones, and half of all programs have poison.
    """
    rng = random.Random(seed)
    style = random_style(rng) if odd and rng.random() < 0.5 else rng.choice(list(styles or STYLES.values()))
    poison = rng.choice(_POISON) if odd else "off"
    fitting = [name for name in faults if not name or SIMULATED[name].fits(style)]
    chosen = rng.choice(fitting) if fitting else ""
    wanted = SIMULATED[chosen].calls.split() if chosen else []
    weights = [weight + 8 * (what in wanted) for what, weight in _WEIGHTS.items()]
    calls = [Call("submit", rng.randrange(1 << 20))]
    calls += [Call(what, rng.randrange(1 << 20)) for what in rng.choices(list(_WEIGHTS), weights, k=length)]
    at = rng.randrange(2, length)
    return Program(style=style, seed=seed, calls=tuple(calls), fault=chosen, at=at, poison=poison)


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
    given = config or CanaryConfig(mode="log", key=7, stats_every=0, health_every=0)
    inline = Inline(engine, replace(given, poison=program.poison) if program.poison != "off" else given)
    injector = SimulatedInjector(engine, seed=program.seed)
    player = Player(engine)
    engine.oracle.watchful = bool(program.fault)
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
        ran=engine.oracle.ran,
        begun=engine.oracle.begun,
        lengths={request.name: len(request.tokens) for request in player.requests},
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
        whole: dict[str, Callable[[], object]] = {
            "step": engine.step,
            "weights": engine.update_weights,
            "idle": engine.idle,
            "run": engine.device.run,
            "submit": lambda: self._submit(number),
        }
        running: dict[str, Callable[[Request], object]] = {
            "preempt": engine.preempt,
            "defragment": lambda one: defragment(engine, one),
            "deduplicate": lambda one: deduplicate(engine, one),
            "offload": engine.tier.send,
            "fork": self._fork,
        }
        known: dict[str, Callable[[Request], object]] = {
            "abort": engine.abort,
            "again": lambda old: self._again(old, number),
            "alike": lambda old: self._alike(old, number),
        }
        if call.what in whole:
            whole[call.what]()
        elif call.what in running and engine.running:
            running[call.what](engine.running[number % len(engine.running)])
        elif call.what in known and self.requests:
            known[call.what](self.requests[number % len(self.requests)])

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

    def _fork(self, request: Request) -> None:
        child = self.engine.fork(request)
        if child is not None:
            self.requests.append(child)

    def _alike(self, old: Request, number: int) -> None:
        """The text of an earlier prompt, from somebody else or with another picture."""
        identity = (b"", b"adapter", b"tenant")[number // 64 % 3]
        salts = {1: 77 + number // 256 % 3} if number // 1024 % 2 and len(old.tokens) > 2 else None
        self.requests.append(self.engine.submit(old.tokens, 1 + number // 4096 % 4, identity=identity, salts=salts))

    def _again(self, old: Request, number: int) -> None:
        """The next turn of a talk: what was said so far, and more."""
        prompt = [*old.tokens, *self.engine.prompt(1 + number % 5)]
        if len(prompt) < LONGEST:
            limit = 2 + number // 64 % 4
            self.requests.append(self.engine.submit(prompt, limit, identity=old.identity, salts=old.salts))
