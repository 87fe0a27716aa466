from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.events import Event
from kvcanary.testing import EventRecorder
from tests.canary.hand import HandEngine

E = TypeVar("E", bound=Event)


class Bench:
    """A canary with a recorder and a hand engine."""

    def __init__(self, **settings: Any) -> None:
        self.recorder = EventRecorder()
        self.canary = Canary(CanaryConfig(**{"mode": "log", **settings}), observers=[self.recorder]).start()
        self.engine = HandEngine(self.canary)

    def violations(self) -> list[Any]:
        """Violations so far, after everything was delivered."""
        return self.of("ViolationDetected")

    def of(self, name: str) -> list[Any]:
        """Events of one type so far."""
        return [event for event in self.of_kind(Event) if type(event).__name__ == name]

    def of_kind(self, kind: type[E]) -> list[E]:
        """Events of a type so far, subclasses included."""
        assert self.canary.flush(5)
        assert self.canary.bus.flush(time.monotonic() + 5)
        return self.recorder.of(kind)

    def kinds(self) -> set[str]:
        """Kinds of violation so far."""
        return {violation.kind for violation in self.violations()}


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**settings: Any) -> Bench:
        made.append(Bench(**settings))
        return made[-1]

    yield make
    for bench in made:
        bench.canary.stop(5)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
