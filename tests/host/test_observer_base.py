"""How functions and objects become observers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Union

import pytest

from kvcanary.errors import ConfigError
from kvcanary.events import Event, IncidentOpened, KernelStalled, PagesAllocated, PagesFact, StatsReported
from kvcanary.observers.base import as_observer, is_fold, observer
from kvcanary.observers.stats import StatsFold

if TYPE_CHECKING:
    from kvcanary.events import HealthChecked

Alert = IncidentOpened | KernelStalled


def test_the_annotation_is_the_filter() -> None:
    @observer
    def tell_me(event: IncidentOpened | KernelStalled) -> None: ...

    spec = as_observer(tell_me)
    assert spec.interests == (IncidentOpened, KernelStalled)
    assert spec.wants(KernelStalled)
    assert not spec.wants(StatsReported)
    assert spec.name.endswith("tell_me")
    assert not spec.is_async


def test_the_decorated_function_is_the_function() -> None:
    def add(event: KernelStalled) -> int:
        return event.launches + 1

    assert observer(add) is add
    assert add(KernelStalled(role="check", launches=1, expected=2)) == 2


def test_event_means_all_events() -> None:
    @observer
    def everything(event: Event) -> None: ...

    assert as_observer(everything).wants(StatsReported)


def test_a_base_type_takes_its_subclasses() -> None:
    @observer
    def pages(event: PagesFact) -> None: ...

    assert as_observer(pages).wants(PagesAllocated)
    assert not as_observer(pages).wants(StatsReported)


def test_unions_may_be_written_in_every_way() -> None:
    @observer
    def alias(event: Alert) -> None: ...

    @observer
    def old(event: Union[IncidentOpened, KernelStalled]) -> None: ...  # noqa: UP007

    @observer
    def annotated(event: Annotated[Alert, "a note"]) -> None: ...

    for function in (alias, old, annotated):
        assert as_observer(function).interests == (IncidentOpened, KernelStalled)


def test_annotations_that_are_no_strings_work_as_well() -> None:
    def function(event: Any) -> None: ...

    function.__annotations__["event"] = IncidentOpened | KernelStalled
    assert as_observer(function).interests == (IncidentOpened, KernelStalled)


def test_a_sequence_makes_a_batch_observer() -> None:
    @observer
    def many(events: Sequence[IncidentOpened]) -> None: ...

    spec = as_observer(many)
    assert spec.batch
    assert spec.interests == (IncidentOpened,)


def test_an_async_function_is_known_as_such() -> None:
    @observer(name="pager", queue=5, on_full="drop_newest", restart="stop", max_failures=2)
    async def page(event: IncidentOpened) -> None: ...

    spec = as_observer(page)
    assert spec.is_async
    assert (spec.name, spec.queue, spec.on_full, spec.restart, spec.max_failures) == (
        "pager",
        5,
        "drop_newest",
        "stop",
        2,
    )


def test_a_function_without_the_decorator_is_an_observer_too() -> None:
    def plain(event: KernelStalled) -> None: ...

    assert as_observer(plain).interests == (KernelStalled,)
    assert as_observer(functools.partial(plain)).interests == (KernelStalled,)


def test_a_bound_method_is_an_observer() -> None:
    class Page:
        def call(self, event: KernelStalled) -> None: ...

    assert as_observer(Page().call).interests == (KernelStalled,)


def test_a_callable_object_is_an_observer() -> None:
    class Page:
        async def __call__(self, event: KernelStalled) -> None: ...

    spec = as_observer(Page())
    assert spec.interests == (KernelStalled,)
    assert spec.is_async


def test_a_return_type_for_type_checkers_alone_does_no_harm() -> None:
    @observer
    def checked(event: IncidentOpened) -> HealthChecked | None: ...

    assert as_observer(checked).interests == (IncidentOpened,)


def test_a_missing_annotation_is_refused() -> None:
    def silent(event) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(ConfigError, match=r"silent': its argument 'event' has no annotation, which is the filter"):
        observer(silent)


def test_an_annotation_that_is_no_event_is_refused() -> None:
    def wrong(event: IncidentOpened | int) -> None: ...

    with pytest.raises(ConfigError, match="<class 'int'> is not an event type"):
        observer(wrong)


def test_any_is_refused_as_an_annotation() -> None:
    def wrong(event: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"typing\.Any is not an event type"):
        observer(wrong)


def test_a_name_that_cannot_be_resolved_is_explained() -> None:
    def hidden(event: HealthChecked) -> None: ...

    with pytest.raises(ConfigError, match=r"'HealthChecked' cannot be resolved .* pass interests="):
        observer(hidden)


def test_interests_replace_an_annotation_that_cannot_be_resolved() -> None:
    @observer(interests=(KernelStalled,))
    def hidden(event: HealthChecked) -> None: ...

    assert as_observer(hidden).interests == (KernelStalled,)


def test_a_function_of_two_arguments_is_refused() -> None:
    def two(event: IncidentOpened, more: int) -> None: ...

    with pytest.raises(ConfigError, match="must take one event"):
        as_observer(two)
    with pytest.raises(ConfigError, match="must take one event"):
        as_observer(lambda: None)


def test_an_object_gives_its_options_by_attributes() -> None:
    class Slow:
        name = "slow"
        interests = (StatsReported,)
        queue = 3
        restart = "restart"

        def open(self) -> None: ...

        async def handle(self, event: StatsReported) -> None: ...

    spec = as_observer(Slow())
    assert (spec.name, spec.queue, spec.restart, spec.is_async, spec.batch) == ("slow", 3, "restart", True, False)
    assert spec.open is not None
    assert spec.close is None


def test_an_async_open_makes_the_whole_observer_async() -> None:
    class Opening:
        interests = (StatsReported,)

        async def open(self) -> None: ...

        def handle_batch(self, events: Sequence[StatsReported]) -> None: ...

    spec = as_observer(Opening())
    assert spec.is_async
    assert spec.batch
    assert spec.name.endswith("Opening")


def test_a_class_is_made_an_instance() -> None:
    class Counting:
        interests = (Event,)

        def handle(self, event: Event) -> None: ...

    assert as_observer(Counting).interests == (Event,)


def test_a_class_that_wants_arguments_is_refused() -> None:
    class Needy:
        interests = (Event,)

        def __init__(self, what: str) -> None: ...

        def handle(self, event: Event) -> None: ...

    with pytest.raises(ConfigError, match=r"cannot be made without arguments .* pass an instance"):
        as_observer(Needy)


def test_an_object_without_interests_is_refused() -> None:
    class Blind:
        def handle(self, event: Event) -> None: ...

    with pytest.raises(ConfigError, match="Blind has no `interests`"):
        as_observer(Blind())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("interests", (int,), "expected a tuple of at least one event type"),
        ("interests", (), "expected a tuple of at least one event type"),
        ("interests", [Event], "expected a tuple of at least one event type"),
        ("queue", 0, "expected None or a number of events of at least 1"),
        ("on_full", "block", "expected one of drop_oldest, drop_newest"),
        ("restart", "never", "expected one of continue, restart, stop"),
        ("max_failures", 0, "expected at least 1"),
        ("open", 3, "expected something callable"),
        ("name", 3, "expected a string"),
    ],
)
def test_a_wrong_option_is_refused(option: str, value: object, message: str) -> None:
    class Wrong:
        interests = (Event,)

        def handle(self, event: Event) -> None: ...

    wrong = Wrong()
    setattr(wrong, option, value)
    with pytest.raises(ConfigError, match=message):
        as_observer(wrong)


def test_what_is_no_observer_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="an observer is a function such as"):
        as_observer(object())


def test_folds_are_told_from_sinks() -> None:
    class Sink:
        interests = (Event,)

        def handle(self, event: Event) -> None: ...

    assert is_fold(StatsFold(1))
    assert not is_fold(Sink())


def test_a_handler_that_yields_would_never_run_and_is_refused() -> None:
    class Yielding:
        interests = (Event,)

        async def handle(self, event: Event) -> object:
            yield event

    with pytest.raises(ConfigError, match="expected something callable that yields nothing"):
        as_observer(Yielding())
