from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import kvcanary
from kvcanary.engines import base
from kvcanary.engines.base import FACTS, Patches, find_adapter, unarmed_checks
from kvcanary.errors import ConfigError


class Engine:
    """Has a method and an attribute."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self, count: int = 1) -> int:
        """Count calls."""
        self.calls += count
        return self.calls


class EngineAdapter:
    name = "toy"
    facts = FACTS - {"publish", "weights"}
    quarantines = False

    def matches(self, engine: object) -> bool:
        return isinstance(engine, Engine)

    def attach(self, engine: Any, canary: Any) -> Callable[[], None]:
        return lambda: None


class Entry:
    """What importlib.metadata gives for an entry point."""

    name = "toy"
    value = "toy:adapter"

    def __init__(self, made: Any) -> None:
        self._made = made

    def load(self) -> Any:
        if isinstance(self._made, Exception):
            raise self._made
        return self._made


def test_an_adapter_that_delivers_what_is_no_fact_is_refused_with_a_near_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineAdapter, "facts", frozenset({"aloc", "free"}))
    with pytest.raises(ConfigError, match=r"toy adapter names a fact 'aloc' in `facts` [(]did you mean 'alloc'"):
        unarmed_checks(EngineAdapter())


def test_an_unknown_engine_is_refused_with_its_type_and_what_is_supported() -> None:
    with pytest.raises(ConfigError, match=r"builtins\.dict.*supported are .*transformers"):
        find_adapter({})


def test_a_registered_adapter_is_found_before_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "entry_points", lambda group: [Entry(EngineAdapter)])
    assert find_adapter(Engine()).name == "toy"


def test_a_registered_adapter_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "entry_points", lambda group: [Entry(ImportError("no such module"))])
    with pytest.raises(ConfigError, match=r"'toy' \(toy:adapter\).*no such module"):
        find_adapter(Engine())


def test_something_registered_that_is_no_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "entry_points", lambda group: [Entry(Engine)])
    with pytest.raises(ConfigError, match="toy:adapter makes a Engine, which lacks"):
        find_adapter(Engine())


def test_checks_whose_facts_an_adapter_does_not_deliver_are_unarmed_with_a_reason() -> None:
    unarmed = unarmed_checks(EngineAdapter())
    assert unarmed["STALE_EPOCH"] == "the toy adapter delivers no weights facts"
    assert {"PUBLISHED_UNOWNED", "PUBLISHED_UNWRITTEN", "FREED_WHILE_PUBLISHED"} <= unarmed.keys()
    assert "WRITE_FREED" not in unarmed


def test_a_wrapped_method_keeps_its_name_and_signature() -> None:
    engine, patches = Engine(), Patches()
    patches.wrap(engine, "step", lambda original: lambda *args, **kwargs: original(*args, **kwargs) + 100)
    assert engine.step(count=2) == 102
    assert inspect.signature(engine.step) == inspect.signature(Engine().step)
    assert engine.step.__name__ == "step"


def test_undoing_leaves_the_attributes_as_they_were() -> None:
    engine, patches = Engine(), Patches()
    own = vars(engine)["own"] = lambda: "own"
    before = dict(vars(engine))
    patches.claim(engine)
    patches.wrap(engine, "step", lambda original: original)
    patches.wrap(engine, "own", lambda original: lambda: "wrapped")
    assert vars(engine) != before
    patches.undo()
    assert vars(engine) == before
    assert vars(engine)["own"] is own


def test_undoing_twice_does_nothing_more() -> None:
    done: list[str] = []
    patches = Patches()
    patches.on_undo(lambda: done.append("first"))
    patches.on_undo(lambda: done.append("second"))
    patches.undo()
    patches.undo()
    assert done == ["second", "first"]


def test_a_wrapper_that_somebody_wrapped_in_turn_passes_calls_through_once_undone() -> None:
    engine, patches = Engine(), Patches()
    patches.wrap(engine, "step", lambda original: lambda: original() + 100)
    ours = engine.step
    vars(engine)["step"] = lambda: ours() + 1000
    assert engine.step() == 1101
    patches.undo()
    assert engine.step() == 1002


def test_a_method_that_is_not_there_cannot_be_wrapped() -> None:
    with pytest.raises(ConfigError, match="Engine has no method 'steps'"):
        Patches().wrap(Engine(), "steps", lambda original: original)


def test_an_engine_is_claimed_once_at_a_time() -> None:
    engine, first = Engine(), Patches()
    first.claim(engine)
    with pytest.raises(ConfigError, match="watched by another canary"):
        Patches().claim(engine)
    first.undo()
    Patches().claim(engine)


def test_looking_for_an_adapter_imports_neither_torch_nor_an_engine() -> None:
    program = (
        "import sys\n"
        "from kvcanary.engines.base import find_adapter\n"
        "from kvcanary.errors import ConfigError\n"
        "try: find_adapter(object())\n"
        "except ConfigError: pass\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_quarantine_is_refused_for_an_engine_whose_adapter_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "entry_points", lambda group: [Entry(EngineAdapter)])
    with pytest.raises(ConfigError, match="mode 'quarantine': the toy adapter can neither heal nor abort"):
        kvcanary.watch(Engine(), mode="quarantine").start()
