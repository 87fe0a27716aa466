"""The faults of the field on the simulated engine, and how one is planted into a running one.

How each is done is in :mod:`kvcanary.faults.simulated_batches` (what a forward is given),
:mod:`kvcanary.faults.simulated_pages` (pages and prefixes) and :mod:`kvcanary.faults.simulated_copies`. Whether it did
harm, and to whom, the engine's oracle says: planting one may find no victim, and may change nothing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Self

from kvcanary.engines.base import Patches
from kvcanary.engines.simulated import SimulatedEngine
from kvcanary.errors import ConfigError
from kvcanary.events import FaultInjected
from kvcanary.faults.injectors import Fault, Injection
from kvcanary.faults.simulated_batches import BATCH_FAULTS
from kvcanary.faults.simulated_copies import COPY_FAULTS
from kvcanary.faults.simulated_ops import Operation
from kvcanary.faults.simulated_pages import PAGE_FAULTS

if TYPE_CHECKING:
    from kvcanary.canary import Canary

SIMULATED: dict[str, Operation] = {op.fault.name: op for op in (*BATCH_FAULTS, *PAGE_FAULTS, *COPY_FAULTS)}
"""All of them, by name."""


class SimulatedInjector:
    """Plants one fault into an engine that is watched already.

    Args:
        engine: whose methods are wrapped until :meth:`undo`.
        canary: is told that a fault was injected; None: nobody is.
        seed: of victims.

    Attributes:
        injection: what was done, once it was.
    """

    def __init__(self, engine: SimulatedEngine, canary: Canary | None = None, *, seed: int = 0) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.patches = Patches()
        self.injection: Injection | None = None
        self.fault: Fault | None = None
        self._canary = canary

    def plant(self, name: str) -> Self:
        """Do a fault at the next occasion.

        Raises:
            ConfigError: unknown, planted already, or it cannot happen in this style.
        """
        operation = SIMULATED.get(name)
        if operation is None:
            raise ConfigError(f"no fault {name!r}; known are {', '.join(SIMULATED)}")
        if self.fault is not None:
            raise ConfigError(f"{self.fault.name!r} is planted already; one injector plants one fault")
        if not operation.fits(self.engine.style):
            raise ConfigError(f"fault {name!r} cannot happen in style {self.engine.style.name!r}")
        self.fault = operation.fault
        operation.arm(self)
        return self

    def done(self, *requests: str, group: str = "", detail: str = "", forward: int = 0) -> None:
        """An operation did its work, to ``requests``; ``forward`` is the first that it touches, 0: the next one."""
        if self.fault is None or self.injection is not None:
            return
        forward = forward or self.engine.forwards + 1
        self.injection = Injection(fault=self.fault, forward=forward, requests=requests, group=group, detail=detail)
        if self._canary is not None:
            self._canary.emit(
                FaultInjected(
                    forward=forward,
                    fault=self.fault.name,
                    description=detail or self.fault.description,
                    expects=self.fault.expects,
                    request=requests[0] if requests else "",
                    group=group,
                )
            )

    def undo(self) -> None:
        """Take all hooks out; what was done stays done."""
        self.patches.undo()
