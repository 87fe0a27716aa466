"""One model's time on stage: traffic from an async loop, clean phases, planted faults."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.to_thread
import msgspec

from kvcanary.canary import Canary
from kvcanary.cli.models import ModelName, Prompts, make_manager, make_model
from kvcanary.cli.report import POSITIONS, DemoError, FaultJudged, PhaseEnded, Results, judge
from kvcanary.cli.scoreboard import PhaseChanged, Scoreboard, Totals, alarms
from kvcanary.config import CanaryConfig
from kvcanary.errors import ConfigError
from kvcanary.events import KernelStalled
from kvcanary.faults.injectors import Fault, Injection
from kvcanary.faults.transformers_faults import TransformersInjector
from kvcanary.observers.base import Observer
from kvcanary.watching import watch

CLIENTS = 8
HEALTH_PERIOD = 20
"""Forwards between two health checks: a stalled kernel should not keep people waiting."""
PATIENCE_S = 20.0
"""How long anything may take that should take a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for, checked."""

    seconds: float
    seed: int
    models: tuple[ModelName, ...]
    faults: tuple[Fault, ...]

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"--seconds is {self.seconds}; expected more than 0 and at most 3600")

    @property
    def share(self) -> int:
        """Slot positions that one clean phase verifies at least."""
        phases = 2 if self.faults else 1
        return -(-POSITIONS // (phases * len(self.models)))


class Output(Protocol):
    """Where the demo tells what happens."""

    @property
    def observers(self) -> tuple[Observer, ...]:
        """What listens to a run beside the scoreboard."""
        ...

    def showing(self, board: Scoreboard, model: ModelName) -> AbstractContextManager[object]:
        """Follow one model's run."""
        ...

    def told(self, report: PhaseEnded | FaultJudged) -> None:
        """Something has been judged; it is in the stream, too."""

    def closing(self, results: Results, seconds: float) -> None:
        """The demo has ended, after so many seconds."""


async def serve(options: Options, output: Output, results: Results) -> None:
    """Serve each model in turn; what was judged goes to ``results`` as it comes.

    Raises:
        DemoError: the engine failed.
    """
    config = CanaryConfig(mode="log", health_every=HEALTH_PERIOD, health_warmup=HEALTH_PERIOD)
    for number, name in enumerate(options.models):
        model = await anyio.to_thread.run_sync(functools.partial(make_model, name, seed=options.seed))
        manager = make_manager(model)
        board = Scoreboard()
        with output.showing(board, name):
            async with watch(manager, config=config, observers=[board, *output.observers]) as kv, _running(manager):
                if kv.canary is None:
                    raise ConfigError("KVCANARY_MODE=off is set, and a demo without a canary shows nothing; unset it")
                stage = Stage(name, manager, kv.canary, board, seed=options.seed + 1000 * number)
                await stage.play(options, output, results)


@asynccontextmanager
async def _running(manager: Any) -> AsyncGenerator[None]:
    manager.start()
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            stop = functools.partial(manager.stop, block=True, timeout=PATIENCE_S, hard_stop=True)
            await anyio.to_thread.run_sync(stop)


class Stage:
    """One model with its engine, its canary and its clients."""

    def __init__(self, name: ModelName, manager: Any, canary: Canary, board: Scoreboard, *, seed: int) -> None:
        self._name = name
        self._manager = manager
        self._canary = canary
        self._board = board
        self._seeds = itertools.count(seed)
        self._numbers = itertools.count(1)
        self._requests = itertools.count(1)
        self._seed = seed

    async def play(self, options: Options, output: Output, results: Results) -> None:
        """Clean, broken, clean again."""
        await self._settle()  # the first answer: the engine has its pool from here on
        await self._clean("clean before", options, output, results)
        with TransformersInjector(self._manager, self._canary, seed=self._seed) as injector:
            for fault in options.faults:
                verdict = await self._broken(fault, injector)
                results.verdicts.append(verdict)
                self._tell(verdict, output)
        if options.faults:
            await self._clean("clean after", options, output, results)

    # --- phases -------------------------------------------------------------------------------------------

    async def _clean(self, phase: str, options: Options, output: Output, results: Results) -> None:
        start, seen = await self._enter(phase)
        async with self._traffic():
            await anyio.sleep(options.seconds)
            # On a slow machine a little longer; if that does not do, the report says that it verified too little.
            enough = start.positions + options.share
            await self._board.until(lambda: self._board.totals.positions >= enough, PATIENCE_S)
        end = await self._leave()
        report = PhaseEnded(
            **self._now(),
            model=self._name,
            phase=phase,
            forwards=end.forward - start.forward,
            requests=end.finished - start.finished,
            positions=end.positions - start.positions,
            reread=end.reread - start.reread,
            alarms=alarms(self._board.findings(seen)),
        )
        results.phases.append(report)
        self._tell(report, output)

    async def _broken(self, fault: Fault, injector: TransformersInjector) -> FaultJudged:
        _, seen = await self._enter(fault.name)
        async with self._traffic():
            done = injector.plant(fault)
            try:
                injection = await self._done(done)
            except TimeoutError:
                done.cancel()
                problem = f"no forward within {PATIENCE_S:.0f} s had a fitting victim"
                return FaultJudged(model=self._name, fault=fault.name, title=fault.title, headline=problem)
            await self._named(injection, seen)
        if fault.stalls:
            self._canary.suppress("check", suppressed=False)
        await self._leave()
        findings = self._board.findings(seen)
        before = [event for event in findings if event.forward < injection.forward]
        rest = tuple(event for event in findings if event.forward >= injection.forward)
        verdict = judge(self._name, injection, rest, alarms(before))
        return msgspec.structs.replace(verdict, **self._now())

    async def _named(self, injection: Injection, seen: int) -> None:
        """Until the fault had its chance to be named."""

        def done() -> bool:
            if injection.fault.stalls:
                return any(isinstance(event, KernelStalled) for event in self._board.findings(seen))
            return self._board.totals.forward > injection.forward + (injection.fault.within or 0) + 1

        await self._board.until(done, PATIENCE_S)

    async def _enter(self, phase: str) -> tuple[Totals, int]:
        """Begin a phase: totals so far, and the number of findings so far."""
        await self._synchronise(phase)
        return self._board.totals, len(self._board.findings())

    async def _leave(self) -> Totals:
        """End a phase: everything that belongs to it has been reported."""
        await self._settle()
        await self._synchronise(self._board.phase.phase)
        return self._board.totals

    async def _settle(self) -> None:
        """One more short request: ends of requests are audited by the next forward."""
        prompt, _ = Prompts.make(next(self._seeds)).next()
        await self._ask(prompt, 3)

    async def _synchronise(self, phase: str) -> None:
        """Until the scoreboard has seen all that happened so far."""
        if not await anyio.to_thread.run_sync(self._canary.flush, PATIENCE_S):
            raise DemoError(f"the canary's stream did not catch up within {PATIENCE_S:.0f} s")
        number = next(self._numbers)
        self._canary.emit(PhaseChanged(**self._now(), number=number, model=self._name, phase=phase))
        if not await self._board.until(lambda: self._board.phase.number >= number, PATIENCE_S):
            raise DemoError(f"the scoreboard did not catch up within {PATIENCE_S:.0f} s")

    def _tell(self, report: PhaseEnded | FaultJudged, output: Output) -> None:
        self._canary.emit(report)
        output.told(report)

    def _now(self) -> dict[str, int]:
        return {
            "time_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
            "forward": self._canary.next_forward,
        }

    # --- clients ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _traffic(self) -> AsyncGenerator[None]:
        """Clients that ask one thing after another; on leaving, all their answers are in."""
        # Prefixes of its own: a phase never reads pages that an earlier one left behind in the prefix cache.
        prompts, stop = Prompts.make(next(self._seeds)), anyio.Event()
        async with anyio.create_task_group() as clients:
            for _ in range(CLIENTS):
                clients.start_soon(self._client, prompts, stop)
            try:
                yield
            finally:
                stop.set()

    async def _client(self, prompts: Prompts, stop: anyio.Event) -> None:
        while not stop.is_set():
            await self._ask(*prompts.next())

    async def _ask(self, prompt: list[int], max_new_tokens: int) -> None:
        request = f"{self._name}-{next(self._requests)}"
        answered, answers = anyio.Event(), list[Any]()

        def deliver(output: Any) -> None:
            answers.append(output)
            answered.set()

        self._manager.register_result_handler(request, deliver)
        if self._manager.add_request(prompt, request_id=request, max_new_tokens=max_new_tokens) is None:
            raise DemoError(f"the engine takes no more requests: {self._manager.background_thread_status.fatal_error}")
        await answered.wait()
        if answers[0].error is not None:
            raise DemoError(f"the engine failed request {request}: {answers[0].error}")

    async def _done(self, future: Future[Injection]) -> Injection:
        wait = functools.partial(future.result, PATIENCE_S)
        return await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)
