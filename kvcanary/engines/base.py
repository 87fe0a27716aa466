"""What an adapter is, how one is found, and how instances are wrapped and unwrapped without a trace.

Importing this module imports no engine and no torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvcanary.errors import ConfigError
from kvcanary.text import near_to

if TYPE_CHECKING:
    from kvcanary.canary import Canary

ENTRY_POINTS = "kvcanary.engines"
"""Entry-point group: each entry names a class, called without arguments, that makes an :class:`Adapter`."""

_BUILT_IN = (
    "kvcanary.engines.transformers:TransformersAdapter",
    "kvcanary.engines.sglang:SGLangAdapter",
    "kvcanary.engines.vllm:VllmAdapter",
    "kvcanary.engines.simulated:SimulatedAdapter",
)
_MARK = "_kvcanary_watched"

FACTS = frozenset(
    {
        "admit",
        "finish",
        "preempt",
        "rewind",
        "alloc",
        "free",
        "publish",
        "evict",
        "reuse",
        "move",
        "transfer",
        "weights",
    }
)
"""Facts that an adapter may deliver."""

_NEEDS = {
    "FINAL_DIGEST": ("finish",),
    "REQUEST_DIGEST": ("admit",),
    "WRITE_FOREIGN": ("alloc", "admit"),
    "WRITE_FREED": ("free",),
    "UNWRITTEN": ("alloc",),
    "DOUBLE_FREE": ("free", "alloc"),
    "DOUBLE_ALLOC": ("alloc", "free"),
    "EARLY_REUSE": ("alloc", "free", "transfer"),
    "WINDOW_FREED_EARLY": ("alloc", "free"),
    "FREED_WHILE_PUBLISHED": ("publish", "evict", "free"),
    "PUBLISHED_UNOWNED": ("publish", "alloc"),
    "PUBLISHED_UNWRITTEN": ("publish", "alloc"),
    "TRANSFER_OVERLAP": ("transfer",),
    "FAILED_LOAD_USED": ("transfer",),
    "STALE_EPOCH": ("weights",),
}


@runtime_checkable
class Adapter(Protocol):
    """Knows one engine. Register a class of one's own in the entry-point group ``kvcanary.engines``."""

    @property
    def name(self) -> str:
        """The engine's name, as it stands in events."""
        ...

    @property
    def facts(self) -> frozenset[str]:
        """Which of :data:`FACTS` it delivers; checks that need others are reported as unarmed."""
        ...

    @property
    def quarantines(self) -> bool:
        """Whether it can take requests and pages out of service; mode ``quarantine`` is refused where it cannot.

        One that can passes ``quarantine=`` to :meth:`kvcanary.canary.Canary.bind`.
        """
        ...

    def matches(self, engine: object) -> bool:
        """Whether it knows engines of this type. Looks at the type's names only and imports no engine."""
        ...

    def attach(self, engine: Any, canary: Canary) -> Callable[[], None]:
        """Watch ``engine`` with ``canary``; returns what undoes it.

        Raises:
            ConfigError: the engine cannot be watched; it is left exactly as it was.
        """
        ...


def find_adapter(engine: object) -> Adapter:
    """The adapter for an engine: registered ones first, then the built-in ones.

    Raises:
        ConfigError: none knows the engine's type, or a registered one cannot be loaded.
    """
    known: list[str] = []
    for adapter in _adapters():
        if adapter.matches(engine):
            return adapter
        known.append(adapter.name)
    kind = type(engine)
    raise ConfigError(
        f"no adapter knows engines of type {kind.__module__}.{kind.__qualname__}; supported are {', '.join(known)}. "
        f"Pass the engine object itself, or register an adapter in the entry-point group {ENTRY_POINTS!r}"
    )


def unarmed_checks(adapter: Adapter) -> dict[str, str]:
    """Checks that cannot be made because the adapter does not deliver what they need, each with its reason.

    Raises:
        ConfigError: it says that it delivers what is no fact.
    """
    for fact in sorted(adapter.facts - FACTS):
        raise ConfigError(
            f"the {adapter.name} adapter names a fact {fact!r} in `facts`{near_to(fact, FACTS)}; "
            f"facts are {', '.join(sorted(FACTS))}"
        )
    missing = FACTS - adapter.facts
    return {
        check: f"the {adapter.name} adapter delivers no {', '.join(sorted(missing & set(needs)))} facts"
        for check, needs in _NEEDS.items()
        if missing & set(needs)
    }


def _adapters() -> Iterator[Adapter]:
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()()
        except Exception as error:
            raise ConfigError(
                f"adapter {entry.name!r} ({entry.value}) of entry-point group {ENTRY_POINTS!r} cannot be loaded: "
                f"{error!r}; fix or uninstall the package that registers it"
            ) from error
        yield _checked(found, entry.value)
    for path in _BUILT_IN:
        module, _, name = path.partition(":")
        yield _checked(getattr(importlib.import_module(module), name)(), path)


def _checked(found: object, where: str) -> Adapter:
    if isinstance(found, Adapter):
        return found
    raise ConfigError(
        f"{where} makes a {type(found).__qualname__}, which lacks name, facts, quarantines, matches or attach of an "
        "adapter"
    )


class Patches:
    """Wrapped methods of instances, and how to take them all back. Never touches a class.

    After :meth:`undo` every object has the attributes it had before. A wrapper that somebody else has wrapped
    in turn cannot be taken out from below; it stays and passes every call straight through.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._live = True

    def claim(self, owner: Any) -> None:
        """Mark an engine object as watched.

        Raises:
            ConfigError: another canary watches it already, or it takes no attributes.
        """
        if _MARK in vars(owner):
            raise ConfigError(
                f"this {type(owner).__qualname__} is watched by another canary already; stop that one first, or use "
                "its handle"
            )
        setattr(owner, _MARK, self)
        self.on_undo(lambda: vars(owner).pop(_MARK, None))

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method on the instance ``owner`` by ``make(original)``, keeping its signature.

        Raises:
            ConfigError: there is no such method.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            raise ConfigError(f"{type(owner).__qualname__} has no method {name!r} to wrap")
        inner = make(original)
        own = vars(owner).get(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs) if self._live else original(*args, **kwargs)

        setattr(owner, name, wrapper)
        self.on_undo(lambda: _restore(owner, name, wrapper, own))

    def after(self, owner: Any, name: str, tell: Callable[..., object]) -> None:
        """Have each call of a method on the instance ``owner`` told as ``tell(result, *arguments)``, once it is done.

        Raises:
            ConfigError: there is no such method.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def told(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                tell(result, *args, **kwargs)
                return result

            return told

        self.wrap(owner, name, make)

    def on_undo(self, action: Callable[[], object]) -> None:
        """Also do this when undone; last come, first done."""
        self._undo.append(action)

    def undo(self) -> None:
        """Take everything back, also what comes after an action that raises. Idempotent."""
        self._live = False
        with ExitStack() as stack:
            actions, self._undo = self._undo, []
            for action in actions:
                stack.callback(action)


def _restore(owner: Any, name: str, wrapper: Callable[..., Any], own: Any) -> None:
    if vars(owner).get(name) is not wrapper:
        return
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
