"""What users write, read by mypy and pyright alone: nothing here is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import kvcanary
from kvcanary import Canary, CanaryConfig, IncidentOpened, KernelStalled, KVCorruptionError, Watch


@kvcanary.observer
def tell_me(event: IncidentOpened | KernelStalled) -> None:
    assert_type(event.seq, int)


@kvcanary.observer(name="pager", queue=10, on_full="drop_newest")
async def page_me(event: IncidentOpened) -> str:
    return event.headline


class Keeper:
    """A sink by structure: no base class."""

    interests = (IncidentOpened,)

    def __init__(self) -> None:
        self.kept: list[str] = []

    def handle_batch(self, events: Sequence[IncidentOpened]) -> None:
        self.kept.extend(event.headline for event in events)


def a_decorated_function_keeps_its_signature(event: IncidentOpened) -> None:
    assert_type(tell_me(event), None)


async def a_decorated_coroutine_function_too(event: IncidentOpened) -> None:
    assert_type(await page_me(event), str)


def watching_takes_functions_and_objects(engine: object) -> None:
    with kvcanary.watch(engine, mode="raise", observers=[tell_me, page_me, Keeper()]) as watched:
        assert_type(watched, Watch)
        assert_type(watched.error, BaseException | None)


async def watching_works_in_async_code(engine: object) -> None:
    async with kvcanary.watch(engine, config=CanaryConfig(mode="log")) as watched:
        assert_type(watched, Watch)


def installing_gives_a_canary_unless_it_is_off(engine: object) -> None:
    assert_type(kvcanary.install_canary(engine), Canary | None)


def an_error_names_what_is_known(error: KVCorruptionError) -> None:
    assert_type(error.request, str | None)
    assert_type(error.slot, int | None)
