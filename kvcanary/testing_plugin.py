"""The pytest plugin: the fixture ``kv_events``. Loaded by entry point, so it imports as little as it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvcanary.testing import EventRecorder


@pytest.fixture
def kv_events() -> EventRecorder:
    """A recorder of its own for each test: ``kvcanary.watch(engine, mode="log", observers=[kv_events])``."""
    from kvcanary.testing import EventRecorder

    return EventRecorder()
