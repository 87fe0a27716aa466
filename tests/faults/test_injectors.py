from __future__ import annotations

from typing import Any

import pytest

from kvcanary.errors import ConfigError
from kvcanary.events import IncidentOpened, IncidentUpdated
from kvcanary.faults.injectors import FAULTS, Injection, fault
from kvcanary.faults.transformers_ops import OPERATIONS
from kvcanary.record import Kind

STALE = Injection(fault=fault("stale-slot"), forward=7, requests=("a", "b"))


def incident(**fields: Any) -> IncidentOpened:
    values: dict[str, Any] = {
        "incident": "1",
        "headline": "",
        "kind": "TABLE_MISMATCH",
        "requests": ("b",),
        "forward": 7,
    }
    return IncidentOpened(**values | fields)


def test_every_fault_can_be_done_on_transformers() -> None:
    assert set(OPERATIONS) == {item.name for item in FAULTS}


def test_every_fault_expects_kinds_that_exist() -> None:
    known = {kind.name for kind in Kind} | {"KERNEL_STALLED"}
    assert {kind for item in FAULTS for kind in item.expects} <= known


def test_an_unknown_fault_is_refused_with_a_near_match() -> None:
    with pytest.raises(ConfigError, match=r"no fault 'flipped-bits'; did you mean 'flipped-bit'\?"):
        fault("flipped-bits")


def test_an_incident_of_the_expected_kind_in_time_and_with_a_hit_request_names_the_fault() -> None:
    assert STALE.named_by(incident())


@pytest.mark.parametrize(
    "fields", [{"kind": "CONTENT"}, {"forward": 8}, {"forward": 6}, {"requests": ("c",)}, {"requests": ()}]
)
def test_another_kind_another_forward_or_another_request_does_not_name_it(fields: dict[str, object]) -> None:
    assert not STALE.named_by(incident(**fields))


def test_an_older_incident_that_grows_by_an_expected_kind_names_it_too() -> None:
    grown = IncidentUpdated(
        incident="1",
        kind="CONTENT",
        headline="",
        kinds={"CONTENT": 1, "TABLE_MISMATCH": 1},
        requests=("x", "a"),
        forward=7,
    )
    assert STALE.named_by(grown)
