"""Lifecycle calls as bytes."""

from __future__ import annotations

import subprocess
import sys
import typing
from typing import Any

import msgspec
import pytest

from kvcanary.errors import BatchError, ConfigError
from kvcanary.wire import WIRE_VERSION, CallName, FactWriter, LifecycleCalls, unpack


class Index:
    """A whole number that is no ``int``, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_calls_arrive_in_order_with_their_arguments() -> None:
    writer = FactWriter()
    writer.alloc("full", "a", [4, 5, 9])
    writer.admit("a", tokens=[7, 8, 9], start=2, identity=b"\xff")
    writer.free(0, [4])
    assert unpack(writer.pack()) == [
        ("alloc", {"group": "full", "request": "a", "pages": [4, 5, 9]}),
        ("admit", {"request": "a", "tokens": [7, 8], "start": 2, "identity": b"\xff", "salts": []}),
        ("free", {"group": 0, "pages": [4], "request": None}),
    ]


def test_what_was_packed_is_not_packed_again() -> None:
    writer = FactWriter()
    assert writer.pack() == b""
    writer.preempt("a")
    assert writer.waiting == 1
    assert writer.pack()
    assert (writer.pack(), writer.waiting) == (b"", 0)


def test_a_list_that_the_engine_goes_on_changing_is_sent_as_it_was() -> None:
    writer, pages = FactWriter(), [1, 2]
    writer.alloc("full", "a", pages)
    pages.append(3)
    assert unpack(writer.pack())[0][1]["pages"] == [1, 2]


def test_whole_numbers_of_other_types_travel_as_numbers() -> None:
    writer = FactWriter()
    numbers: Any = [Index(4), True]
    writer.alloc("full", "a", numbers)
    assert unpack(writer.pack())[0][1]["pages"] == [4, 1]


def test_what_is_no_number_is_refused_by_the_call_that_brings_it() -> None:
    writer = FactWriter()
    wrong: Any = [1.5]
    with pytest.raises(BatchError, match=r"pages must be whole numbers, got \[1\.5\]"):
        writer.alloc("full", "a", wrong)
    assert writer.waiting == 0


def test_a_value_that_cannot_travel_is_refused_and_what_went_with_it_counted() -> None:
    writer = FactWriter()
    strange: Any = object()
    writer.preempt("a")
    writer.preempt(strange)
    with pytest.raises(BatchError, match="must be plain values"):
        writer.pack()
    assert unpack(writer.pack()) == [("facts_lost", {"count": 2})]


def test_a_writer_that_nobody_packs_forgets_all_and_says_so() -> None:
    writer = FactWriter(2)
    for page in range(5):
        writer.alloc("full", "a", [page])
    assert [name for name, _ in unpack(writer.pack())] == ["facts_lost", "alloc", "alloc"]
    writer.preempt("a")
    assert [name for name, _ in unpack(writer.pack())] == ["preempt"]


def test_a_capacity_must_hold_a_call() -> None:
    with pytest.raises(ConfigError, match="is 0; expected at least 1"):
        FactWriter(0)


def test_no_bytes_are_no_facts() -> None:
    assert unpack(b"") == []


def test_bytes_of_another_version_are_refused_by_name() -> None:
    data = msgspec.msgpack.encode((WIRE_VERSION + 1, {"a": "later form"}))
    with pytest.raises(ConfigError, match=f"version {WIRE_VERSION + 1}, expected {WIRE_VERSION}"):
        unpack(data)


NO_CALL = msgspec.msgpack.encode((WIRE_VERSION, [("stop", {})]))
NO_ARGUMENTS = msgspec.msgpack.encode((WIRE_VERSION, [("preempt", 3)]))


@pytest.mark.parametrize("data", [b"\xff", b"nonsense", NO_CALL, NO_ARGUMENTS])
def test_bytes_that_are_no_such_calls_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="no packed facts"):
        unpack(data)


@pytest.mark.parametrize("arguments", [{}, {"request": "a", "wrong": 1}])
def test_a_call_with_other_arguments_is_refused_by_name(arguments: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode((WIRE_VERSION, [("preempt", arguments)]))
    with pytest.raises(ConfigError, match=r"packed facts hold preempt\(\) with .*expected request"):
        unpack(data)


def test_every_call_has_its_method() -> None:
    methods = {name for name in vars(LifecycleCalls) if not name.startswith("_")}
    assert methods == set(typing.get_args(CallName))


def test_a_scheduler_needs_neither_torch_nor_numpy() -> None:
    program = "import sys, kvcanary.wire; print([n for n in ('torch', 'numpy', 'triton') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "[]\n"
