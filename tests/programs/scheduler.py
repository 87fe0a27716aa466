"""The scheduler of an engine whose workers are other processes: it decides and tells, and never loads torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvcanary.wire import FactWriter

PAGE = 4


class Plan(NamedTuple):
    """What one forward computes: all tokens of the requests in it, their pages, and how many are cached."""

    tokens: dict[str, list[int]]
    pages: dict[str, list[int]]
    cached: dict[str, int]
    copies: tuple[tuple[int, int], ...] = ()
    """pages to copy before it, and where to"""


class Scheduler:
    """Requests and pages. ``tell``: a canary in this process, or a writer to one elsewhere."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell
        self.free = list(range(1, 40))
        self.tokens: dict[str, list[int]] = {}
        self.pages: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def admit(self, name: str, tokens: list[int], prefix: list[int] | None = None) -> None:
        self.tokens[name], self.pages[name] = list(tokens), list(prefix or [])
        self.cached[name] = len(self.pages[name]) * PAGE
        self.tell.admit(name, tokens=tokens, start=self.cached[name], identity=b"adapter")
        if prefix:
            self.tell.reuse("full", name, prefix)

    def plan(self) -> Plan:
        """The next forward: what is missing of every prompt, or one token more."""
        for name, tokens in self.tokens.items():
            if self.cached[name] == len(tokens):
                tokens.append(len(tokens) * 7 % 1000)
            missing = -(-len(tokens) // PAGE) - len(self.pages[name])
            if missing > 0:
                new, self.free = self.free[:missing], self.free[missing:]
                self.pages[name] += new
                self.tell.alloc("full", name, new)
        plan = Plan(
            {name: list(tokens) for name, tokens in self.tokens.items()},
            {name: list(pages) for name, pages in self.pages.items()},
            dict(self.cached),
        )
        self.cached = {name: len(tokens) for name, tokens in self.tokens.items()}
        return plan

    def drop(self, name: str, keep: int = 0) -> None:
        """Give the pages back but for the first ``keep``, the next to be handed out."""
        self.tell.free("full", self.pages[name][keep:], name)
        self.free = self.pages[name][keep:] + self.free
        del self.tokens[name], self.pages[name], self.cached[name]


def clean_story(tell: Any) -> Iterator[Plan]:
    """A life of three requests: every call that a scheduler makes."""
    scheduler = Scheduler(tell)
    first = list(range(100, 109))
    scheduler.admit("a", first)
    scheduler.admit("b", list(range(300, 306)))
    yield scheduler.plan()
    tell.publish("full", scheduler.pages["a"][:2], "a")
    scheduler.admit("c", [*first[:8], 7, 8, 9], prefix=scheduler.pages["a"][:2])
    yield scheduler.plan()
    tell.rewind("b", 5, tokens=scheduler.tokens["b"])
    scheduler.tokens["b"][5:], scheduler.cached["b"] = [], 5
    yield scheduler.plan()
    tell.finish("a", tokens=scheduler.tokens["a"], length=scheduler.cached["a"])
    scheduler.drop("a", keep=2)
    tell.preempt("b")
    resumed = list(scheduler.tokens["b"])
    scheduler.drop("b")
    yield scheduler.plan()
    scheduler.admit("b", resumed)
    tell.transfer("t1", "start", group="full", pages=[30, 31], direction="in", ordered=True, request="b")
    yield scheduler.plan()
    tell.transfer("t1", "landed")
    source, target = scheduler.pages["c"][-1], scheduler.free.pop(0)
    tell.own("full", "c", [target])
    tell.move("full", [source], [target], "c")
    tell.restamp("full", [source])
    yield scheduler.plan()._replace(copies=((source, target),))
    tell.weights_updated(2)
    tell.evict("full", scheduler.pages["c"][:2])
    tell.finish("c", tokens=scheduler.tokens["c"], length=scheduler.cached["c"])
    scheduler.drop("c")
    yield scheduler.plan()


def faulty_story(tell: Any) -> Iterator[Plan]:
    """``b`` is given a page that ``a`` still holds."""
    scheduler = Scheduler(tell)
    scheduler.admit("a", list(range(100, 109)))
    yield scheduler.plan()
    scheduler.free.insert(0, scheduler.pages["a"][-1])
    scheduler.admit("b", list(range(300, 306)))
    yield scheduler.plan()
    yield scheduler.plan()


def serve(pipe: Connection, story: str) -> None:
    """The other process: one message a step, the facts riding on it."""
    writer = FactWriter()
    for plan in globals()[story](writer):
        pipe.send((writer.pack(), plan))
    pipe.send((writer.pack(), None))
    pipe.send([name for name in ("torch", "numpy", "triton") if name in sys.modules])
    pipe.close()
