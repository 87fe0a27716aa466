"""What an observer is: folds, sinks, and the decorator that turns a function into a sink.

A **fold** is synchronous and pure. It runs inline on the drain in a fixed order, sees every event it is
interested in, and may derive events. A **sink** has a bounded queue of its own, may lose (and counts what it
loses), may be asynchronous, and derives nothing.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, TypeGuard, TypeVar, Union, cast, overload

from kvcanary.errors import ConfigError
from kvcanary.events import Event

OnFull = Literal["drop_oldest", "drop_newest"]
"""What a full queue gives up."""

Restart = Literal["continue", "restart", "stop"]
"""After a failure: go on with the next event; close, wait a while and open again; or end the subscription."""

MAX_FAILURES = 10
"""Failures in a row after which an observer is stopped, whatever its policy."""

_SPEC = "__kvcanary_observer__"
_EXAMPLE = "def tell_me(event: IncidentOpened | KernelStalled) -> None"


class Fold(Protocol):
    """Sync, pure, inline on the drain. One with state lists ``RunStarted`` in its interests, and resets itself then.

    Optional attribute: ``emits``, the event types it derives, by which the order of folds is checked.
    """

    @property
    def name(self) -> str:
        """The name in counts and messages, and ``by`` of what it derives."""
        ...

    @property
    def interests(self) -> tuple[type[Event], ...]:
        """Event types it sees, subclasses included."""
        ...

    @property
    def guard(self) -> bool:
        """Whether its failure leaves the run without protection; the run is then marked degraded."""
        ...

    def handle(self, event: Any, /) -> Iterable[Event] | None:
        """Derived events, or None; the bus fills in ``cause`` and ``by`` where they are empty."""


class Sink(Protocol):
    """One event at a time; ``handle`` is sync or async.

    Optional attributes: ``name`` (str), ``open()`` and ``close()`` (sync or async), ``queue`` (events it may lag
    behind), ``on_full``, ``restart``, ``max_failures``: as in :func:`observer`.
    """

    @property
    def interests(self) -> tuple[type[Event], ...]:
        """Event types it gets, subclasses included."""
        ...

    def handle(self, event: Any, /) -> object:
        """Called for each event."""


class BatchSink(Protocol):
    """All that is queued at once; ``handle_batch`` is sync or async. Optional attributes as for :class:`Sink`."""

    @property
    def interests(self) -> tuple[type[Event], ...]:
        """Event types it gets, subclasses included."""
        ...

    def handle_batch(self, events: Sequence[Any], /) -> object:
        """Called with events in their order."""


Observer = Callable[[Any], object] | Sink | BatchSink
"""What ``observers=`` and ``subscribe`` take."""

F = TypeVar("F", bound=Callable[[Any], object])


@dataclass(frozen=True, slots=True)
class ObserverSpec:
    """An observer in the one form that the bus knows.

    Attributes:
        name: for counts and messages; the bus makes it unique.
        interests: event types; subclasses are included, ``Event`` means all.
        call: takes one event, or a sequence of them if ``batch``. Its result is awaited when it is awaitable.
        is_async: ``call``, ``open`` or ``close`` is a coroutine function; it runs on the loop that subscribed.
        queue: bound of its queue in events; None: the run's default.
    """

    name: str
    interests: tuple[type[Event], ...]
    call: Callable[[Any], object]
    is_async: bool = False
    batch: bool = False
    queue: int | None = None
    on_full: OnFull = "drop_oldest"
    restart: Restart = "continue"
    max_failures: int = MAX_FAILURES
    open: Callable[[], object] | None = None
    close: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        _check_options(self)

    def wants(self, event_type: type[Event]) -> bool:
        """Whether events of this type are delivered."""
        return issubclass(event_type, self.interests)


@overload
def observer(function: F, /) -> F: ...


@overload
def observer(
    *,
    name: str | None = None,
    interests: tuple[type[Event], ...] | None = None,
    queue: int | None = None,
    on_full: OnFull = "drop_oldest",
    restart: Restart = "continue",
    max_failures: int = MAX_FAILURES,
) -> Callable[[F], F]: ...


def observer(
    function: Callable[[Any], object] | None = None,
    /,
    *,
    name: str | None = None,
    interests: tuple[type[Event], ...] | None = None,
    queue: int | None = None,
    on_full: OnFull = "drop_oldest",
    restart: Restart = "continue",
    max_failures: int = MAX_FAILURES,
) -> Any:
    """Make a function an observer; the annotation of its argument is the filter.

    ``event: IncidentOpened | KernelStalled`` takes these two, ``event: Event`` takes all, and
    ``events: Sequence[IncidentOpened]`` takes them in batches. The function stays what it was and can be called.

    Args:
        function: takes one event, or a sequence of them; sync or async.
        name: name in counts and messages; default: the function's qualified name.
        interests: event types, when the annotation cannot say them.
        queue: bound of its queue in events; default: ``CanaryConfig.sink_queue``.
        on_full: which event a full queue gives up.
        restart: what a failure leads to.
        max_failures: failures in a row after which it is stopped.

    Raises:
        ConfigError: the annotation is missing, is no event type, or names something that cannot be resolved.
    """

    def decorate(target: Callable[[Any], object]) -> Callable[[Any], object]:
        spec = _function_spec(
            target,
            name=name,
            interests=interests,
            options={"queue": queue, "on_full": on_full, "restart": restart, "max_failures": max_failures},
        )
        try:
            setattr(target, _SPEC, spec)
        except AttributeError as error:
            raise ConfigError(f"@observer needs a function that takes attributes, got {target!r}") from error
        return target

    return decorate if function is None else decorate(function)


def as_observer(target: object) -> ObserverSpec:
    """The spec of a function, an object with ``interests`` and ``handle`` or ``handle_batch``, or a class of such.

    Raises:
        ConfigError: it is none of these, or its filter or options are wrong.
    """
    if isinstance(target, ObserverSpec):
        return target
    spec = getattr(target, _SPEC, None)
    if isinstance(spec, ObserverSpec):
        return spec
    if isinstance(target, type):
        return as_observer(_make(target))
    if hasattr(target, "handle") or hasattr(target, "handle_batch"):
        return _object_spec(target)
    if callable(target):
        return _function_spec(target)
    raise ConfigError(
        f"an observer is a function such as `{_EXAMPLE}`, or an object with `interests` and `handle`; got {target!r}"
    )


class Stamp(TypedDict):
    """The envelope of a derived event; ``seq`` is the drain's to give."""

    time_ns: int
    monotonic_ns: int
    forward: int
    cause: int
    by: str


def stamp(source: Event, by: str) -> Stamp:
    """The envelope of what fold ``by`` derives from ``source``, with its times: a replay derives the same event."""
    return Stamp(
        time_ns=source.time_ns, monotonic_ns=source.monotonic_ns, forward=source.forward, cause=source.seq, by=by
    )


def is_fold(target: object) -> TypeGuard[Fold]:
    """Whether ``target`` says that it is a fold: it has a boolean ``guard``, ``interests`` and ``handle``."""
    return (
        isinstance(getattr(target, "guard", None), bool)
        and isinstance(getattr(target, "interests", None), tuple)
        and callable(getattr(target, "handle", None))
    )


def _make(cls: type) -> object:
    try:
        return cls()
    except TypeError as error:
        raise ConfigError(
            f"{cls.__qualname__} was given as an observer but cannot be made without arguments ({error}); "
            f"pass an instance"
        ) from error


def _function_spec(
    target: Callable[..., object],
    *,
    name: str | None = None,
    interests: tuple[type[Event], ...] | None = None,
    options: dict[str, Any] | None = None,
) -> ObserverSpec:
    label = name or _label(target)
    annotation = _annotation(target, label) if interests is None else None
    batch = typing.get_origin(annotation) is Sequence
    if batch:
        annotation = typing.get_args(annotation)[0]
    if interests is None:
        interests = _events_of(annotation, label)
    return ObserverSpec(label, interests, target, _is_async(target), batch, **(options or {}))


def _object_spec(target: object) -> ObserverSpec:
    name = getattr(target, "name", None) or type(target).__qualname__
    interests = getattr(target, "interests", None)
    if interests is None:
        raise ConfigError(
            f"observer {name} has no `interests`; give it a tuple of event types, such as interests = (IncidentOpened,)"
        )
    batch = callable(getattr(target, "handle_batch", None))
    call = cast("Callable[[Any], object]", getattr(target, "handle_batch" if batch else "handle"))
    hooks: dict[str, Any] = {hook: getattr(target, hook, None) for hook in ("open", "close")}
    options = ("queue", "on_full", "restart", "max_failures")
    return ObserverSpec(
        name=name,
        interests=interests,
        call=call,
        is_async=any(_is_async(f) for f in (call, *hooks.values()) if f is not None),
        batch=batch,
        **hooks,
        **{option: getattr(target, option) for option in options if hasattr(target, option)},
    )


def _check_options(spec: ObserverSpec) -> None:
    def refuse(what: str, found: object, expected: str) -> ConfigError:
        return ConfigError(f"observer {spec.name!r}: {what} is {found!r}; expected {expected}")

    if not _is(str, spec.name):
        raise refuse("name", spec.name, "a string")
    if not _are_event_types(spec.interests):
        raise refuse("interests", spec.interests, "a tuple of at least one event type")
    if spec.queue is not None and (not _is(int, spec.queue) or spec.queue < 1):
        raise refuse("queue", spec.queue, "None or a number of events of at least 1")
    if spec.on_full not in typing.get_args(OnFull):
        raise refuse("on_full", spec.on_full, f"one of {', '.join(typing.get_args(OnFull))}")
    if spec.restart not in typing.get_args(Restart):
        raise refuse("restart", spec.restart, f"one of {', '.join(typing.get_args(Restart))}")
    if not _is(int, spec.max_failures) or spec.max_failures < 1:
        raise refuse("max_failures", spec.max_failures, "at least 1")
    for label, function in (("handler", spec.call), ("open", spec.open), ("close", spec.close)):
        if function is not None and not _does_its_work_when_called(function):
            raise refuse(label, function, "something callable that yields nothing")


def _does_its_work_when_called(function: object) -> bool:
    yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return callable(function) and not yields


def _is(kind: type, value: object) -> bool:
    # What users pass is checked by their type checker, or by nobody.
    return isinstance(value, kind)


def _are_event_types(interests: Any) -> bool:
    return (
        _is(tuple, interests)
        and bool(interests)
        and all(isinstance(item, type) and issubclass(item, Event) for item in interests)
    )


def _label(target: object) -> str:
    while isinstance(target, functools.partial):
        target = target.func
    return str(getattr(target, "__qualname__", type(target).__qualname__))


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _annotation(target: Callable[..., object], label: str) -> object:
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"observer {label!r}: its signature cannot be read ({error}); wrap it in a function"
        ) from error
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY or len(required) > 1:
        raise ConfigError(
            f"observer {label!r} must take one event, like `{_EXAMPLE}`; its signature is "
            f"({', '.join(map(str, parameters))})"
        )
    annotation = parameters[0].annotation
    if annotation is inspect.Parameter.empty:
        raise ConfigError(
            f"observer {label!r}: its argument {parameters[0].name!r} has no annotation, which is the filter; "
            f"write it like `{_EXAMPLE}`, or `event: Event` for all events"
        )
    return _resolve(annotation, target, label) if isinstance(annotation, str) else annotation


def _resolve(annotation: str, target: Callable[..., object], label: str) -> object:
    # Only this one annotation is evaluated: the return type may well be imported for type checkers alone.
    holder = types.SimpleNamespace(__annotations__={"event": annotation})
    try:
        return typing.get_type_hints(holder, globalns=_globals(target))["event"]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise ConfigError(
            f"observer {label!r}: the annotation {annotation!r} cannot be resolved ({error}); import its names at "
            f"module level (not only under TYPE_CHECKING or inside a function), or pass interests=(...)"
        ) from error


def _globals(target: Any) -> dict[str, Any]:
    while isinstance(target, functools.partial):
        target = target.func
    target = inspect.unwrap(target)
    if not hasattr(target, "__globals__") and not inspect.ismethod(target):
        target = type(target).__call__
    return cast("dict[str, Any]", getattr(inspect.unwrap(getattr(target, "__func__", target)), "__globals__", {}))


def _events_of(annotation: object, label: str) -> tuple[type[Event], ...]:
    found = tuple(_flatten(annotation))
    if not _are_event_types(found):
        wrong = next((item for item in found if not _are_event_types((item,))), annotation)
        raise ConfigError(
            f"observer {label!r}: its argument is annotated {annotation!r}, but {wrong!r} is not an event type; "
            f"write it like `{_EXAMPLE}`, or `event: Event` for all events"
        )
    return cast("tuple[type[Event], ...]", found)


def _flatten(annotation: object) -> Iterable[object]:
    alias: object = getattr(annotation, "__value__", None)  # `type Alert = A | B` of Python 3.12
    if alias is not None:
        yield from _flatten(alias)
    elif typing.get_origin(annotation) in (Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _flatten(part)
    elif typing.get_origin(annotation) is typing.Annotated:
        yield from _flatten(typing.get_args(annotation)[0])
    else:
        yield annotation
