"""What a fault of the simulated engine is made of."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvcanary.engines.base import Patches
from kvcanary.engines.simulated import SimulatedEngine, Style
from kvcanary.engines.simulated.batch import Batch
from kvcanary.faults.injectors import Fault, Injection


class Injector(Protocol):
    """What an operation is given."""

    engine: SimulatedEngine
    rng: random.Random
    patches: Patches
    injection: Injection | None

    def done(self, *requests: str, group: str = "", detail: str = "", forward: int = 0) -> None:
        """It did its work."""
        ...


@dataclass(frozen=True, slots=True)
class Operation:
    """A fault and how it is done.

    Attributes:
        fault: in words, with what must see it and when.
        arm: hooks the engine so that it happens once.
        fits: whether it can happen in a style.
        case: the report of such a fault, as owner/repository#number.
        calls: what has to happen for it to do harm; words of :mod:`kvcanary.faults.programs`.
    """

    fault: Fault
    arm: Callable[[Injector], None]
    fits: Callable[[Style], bool]
    case: str = ""
    calls: str = ""


Change = Callable[[Injector, Batch], "tuple[tuple[str, ...], str, Callable[[], object]] | None"]
"""Chooses victims in a forward; returns their names, a group, and the work that hurts them; None: nobody fits."""


def any_style(_: Style) -> bool:
    """It can happen anywhere."""
    return True


def before_forward(change: Change) -> Callable[[Injector], None]:
    """Do ``change`` on the device, after ids are resolved and before anybody looks at a forward."""

    def arm(injector: Injector) -> None:
        def make(original: Callable[[Batch], None]) -> Callable[[Batch], None]:
            def forward(batch: Batch) -> None:
                hit = change(injector, batch) if injector.injection is None else None
                if hit is not None:
                    names, group, work = hit
                    injector.done(*names, group=group, forward=batch.forward)
                    injector.engine.device.launch(work)
                original(batch)

            return forward

        injector.patches.wrap(injector.engine, "forward", make)

    return arm


def instead(
    owner: Callable[[SimulatedEngine], Any], method: str, act: Callable[..., Any]
) -> Callable[[Injector], None]:
    """Call ``act(injector, original, *args)`` instead of a method, until the fault is done."""

    def arm(injector: Injector) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def replaced(*args: Any, **kwargs: Any) -> Any:
                if injector.injection is not None:
                    return original(*args, **kwargs)
                return act(injector, original, *args, **kwargs)

            return replaced

        injector.patches.wrap(owner(injector.engine), method, make)

    return arm


def operation(
    name: str,
    description: str,
    expects: str,
    arm: Callable[[Injector], None],
    *,
    within: int | None = 0,
    named: bool = True,
    fits: Callable[[Style], bool] = any_style,
    case: str = "",
    calls: str = "",
) -> Operation:
    """A fault and how it is done; ``expects`` are kinds with spaces between, ``named``: a request has to be."""
    title = name.replace("-", " ")
    kinds = tuple(expects.split())
    fault = Fault(name=name, title=title, description=description, expects=kinds, within=within, names_request=named)
    return Operation(fault, arm, fits, case, calls)
