"""What attaching refuses, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcanary.engines.base import find_adapter
from kvcanary.engines.sglang.contract import check_version
from kvcanary.engines.sglang.quarantine import check_quarantine
from kvcanary.errors import ConfigError

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def attaching(served: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = served("tokens")["attaching"]
    return found


def test_a_watch_arms_and_leaves_no_attribute_behind(attaching: dict[str, Any]) -> None:
    assert attaching["armed"]
    assert attaching["left_behind"] == []


def test_with_the_mode_off_nothing_is_wrapped(attaching: dict[str, Any]) -> None:
    assert attaching["off"] == []


def test_a_scheduler_takes_one_canary(attaching: dict[str, Any]) -> None:
    assert "watched by another canary" in attaching["twice"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hisparse", "HiSparse"),
        ("hierarchical", "--enable-hierarchical-cache"),
        ("two_streams", "--enable-pdmux"),
        ("renamed", "lacks what kvcanary uses of it: Scheduler.pause_generation(recv_req)"),
        ("pool", "pool object cannot be viewed; known are"),
        ("layout", "was not found where the layout says"),
        ("version", "sglang 0.4.9 is none of the releases"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_words_and_left_as_it_was(
    attaching: dict[str, Any], what: str, words: str
) -> None:
    assert words in attaching[what]
    assert attaching["after_refusals"] == []


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.24", "0.5.99"])
def test_releases_in_the_range_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "1.0"])
def test_releases_out_of_the_range_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=version):
        check_version(version)


@pytest.mark.parametrize(("tp_size", "dp_size"), [(2, 1), (1, 2)])
def test_quarantine_is_refused_where_ranks_keep_step(tp_size: int, dp_size: int) -> None:
    with pytest.raises(ConfigError, match="quarantine"):
        check_quarantine(tp_size, dp_size)


def test_the_adapter_is_found_by_the_schedulers_type() -> None:
    scheduler = type("Scheduler", (), {"__module__": "sglang.srt.managers.scheduler"})()
    assert find_adapter(scheduler).name == "sglang"
