"""A small paged engine that knows when it goes wrong: the oracle of the property tests, the target of faults.

``kvcanary.watch(SimulatedEngine("ring"), mode="log")`` works as with any other engine.
"""

from __future__ import annotations

from kvcanary.engines.simulated.engine import SimulatedEngine
from kvcanary.engines.simulated.oracle import Wrong
from kvcanary.engines.simulated.style import STYLES, Style

__all__ = ["STYLES", "SimulatedEngine", "Style", "Wrong"]
