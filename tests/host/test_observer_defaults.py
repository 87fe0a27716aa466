"""What a configuration switches on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcanary.config import CanaryConfig
from kvcanary.errors import ConfigError
from kvcanary.events import CanaryArmed, Event, KernelStalled
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds, default_sinks, load_observer
from kvcanary.observers.base import observer
from kvcanary.observers.health import HealthFold

QUIET = CanaryConfig(mode="log", track_ownership=False, stats_every=0, health_every=0)


def names(**settings: Any) -> list[str]:
    return [fold.name for fold in default_folds(msgspec.structs.replace(QUIET, **settings), Mailbox())]


@observer(name="by-name")
def named(event: KernelStalled) -> None:
    """An observer that a configuration can name."""


class Made:
    """A sink that is made without arguments."""

    interests = (Event,)

    def handle(self, event: Event) -> None: ...


a_fold = HealthFold(100, 100, "log", Mailbox())


def test_violations_are_always_watched() -> None:
    assert names() == ["violations"]


def test_each_fold_has_its_switch_and_its_place() -> None:
    assert names(health_every=1, stats_every=1, swa_divergence_every=1) == [
        "violations",
        "health",
        "stats",
        "swa_divergence",
    ]


def test_ownership_comes_before_the_violations_that_it_derives() -> None:
    pytest.importorskip("kvcanary.observers.ownership")
    assert names(track_ownership=True)[:2] == ["ownership", "violations"]


def test_nothing_is_written_unless_asked_for() -> None:
    assert default_sinks(QUIET) == []


def test_the_log_is_a_sink_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    (spec,) = default_sinks(msgspec.structs.replace(QUIET, log=str(path), log_profile="ecs"))
    assert (spec.name, spec.batch, spec.restart) == ("log", True, "restart")
    spec.call([CanaryArmed()])
    assert json.loads(path.read_text())["message"] == "canary.armed"
    assert spec.close is not None
    spec.close()


def test_sinks_can_be_named_in_the_configuration() -> None:
    targets = (f"{__name__}:named", f"{__name__}:Made")
    first, second = default_sinks(msgspec.structs.replace(QUIET, observers=targets))
    assert (first.name, second.name) == ("by-name", "Made")


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("missing", "cannot be loaded .*has no attribute 'missing'"),
        ("QUIET", "an observer is a function such as"),
        ("a_fold", "which is a fold; only sinks can be named"),
    ],
)
def test_a_name_that_is_no_sink_is_refused(attribute: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_observer(f"{__name__}:{attribute}")


def test_a_module_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"observers names 'no\.such\.module:x', which cannot be loaded"):
        load_observer("no.such.module:x")
