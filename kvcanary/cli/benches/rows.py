"""What ``kvcanary bench`` can show: every row with its unit, its target and what it needs. Imports no torch."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcanary.errors import ConfigError, KVCanaryError

Needs = Literal["cpu", "cuda"]
Better = Literal["lower", "higher"]

GIB = 1 << 30
POOL_GIB = 60
LARGE_POOL_GIB = 100
"""For rows whose entries alone exceed the usual pool: each live position has a slot of its own."""


class BenchError(KVCanaryError):
    """The timed work was not the right work: something was reported on clean data, or too little was verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        name: stable; what ``--only`` matches and readers of the JSON look for.
        title: in words, for the table.
        unit: of value and target.
        target: what must be reached; None for figures that only inform.
        better: on which side of the target a value holds.
        bench: module of this package that measures it.
        needs: the device without which the figure means nothing.
        prior: the same figure elsewhere. Never measured in this run.
        part: what it belongs to besides; ``--only`` matches that too.
    """

    name: str
    title: str
    unit: str
    bench: str
    target: float | None = None
    better: Better = "lower"
    needs: Needs = "cuda"
    prior: str = ""
    part: str = ""

    def holds(self, value: float) -> bool | None:
        """Whether ``value`` reaches the target; None without one."""
        if self.target is None:
            return None
        return value <= self.target if self.better == "lower" else value >= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row's value, how it was got, and what else was seen on the way."""

    name: str
    value: float
    method: str
    details: dict[str, Any] = field(default_factory=dict)
    series: list[dict[str, Any]] | None = None


_OTHER_RUN = "SGLang 0.5.23 on an H200, in an earlier run: "
_PAGE = "decode_added_us"
_PLACES = (
    ("p99", "p99, interpreter idle"),
    ("p50", "p50"),
    ("p99_9", "p99.9"),
    ("p50_busy_python", "p50 beside a busy Python thread"),
    ("p99_busy_python", "p99 beside a busy Python thread"),
    ("p99_9_busy_python", "p99.9 beside a busy Python thread"),
)

ROWS: tuple[Row, ...] = (
    Row(name="read_ceiling_gb_s", title="pure read of device memory", unit="GB/s", bench="ceiling", better="higher"),
    Row(
        name=f"{_PAGE}.bs128_ctx1024",
        title="added to a decode step, 128 rows of 1,024",
        unit="us",
        bench="decode",
        target=25,
        prior=_OTHER_RUN + "67 metadata only, 158 to 272 with one layer's bytes",
    ),
    Row(
        name=f"{_PAGE}.bs1_ctx512",
        title="added to a decode step, 1 row of 512",
        unit="us",
        bench="decode",
        target=18,
        prior=_OTHER_RUN + "52 metadata only, 82 to 128 with one layer's bytes",
    ),
    Row(
        name=f"{_PAGE}.bs1_ctx512_noscrub",
        title="the same without the scrub",
        unit="us",
        bench="decode",
        target=10,
        prior=_OTHER_RUN + "52 metadata only, 82 to 128 with one layer's bytes",
    ),
    Row(
        name=f"{_PAGE}.bs256_ctx4096",
        title="added to a decode step, 256 rows of 4,096",
        unit="us",
        bench="decode",
        target=36,
        prior=_OTHER_RUN + "173 metadata only, 1,267 to 2,474 with one layer's bytes",
    ),
    Row(
        name=f"{_PAGE}.bs1_ctx131072_page16",
        title="added to a decode step, 1 row of 131,072, page size 16",
        unit="us",
        bench="decode",
        target=22,
    ),
    Row(
        name=f"{_PAGE}.bs8_ctx131072_page16",
        title="added to a decode step, 8 rows of 131,072, page size 16",
        unit="us",
        bench="decode",
        target=32,
    ),
    Row(
        name="prefill_added_us.tokens16384",
        title="added to a prefill of 16,384 tokens in one request",
        unit="us",
        bench="decode",
        target=410,
        prior=_OTHER_RUN + "9,308 metadata only, 122,885 with one layer's K",
    ),
    Row(
        name="verify_us.entries2m_page16",
        title="verify 2,097,152 entries, page size 16",
        unit="us",
        bench="verify",
        target=16,
    ),
    Row(
        name="verify_us.entries2m_page1",
        title="verify 2,097,152 entries, page size 1, random slots",
        unit="us",
        bench="verify",
        target=42,
        prior=_OTHER_RUN + "153",
    ),
    Row(
        name="fingerprint_percent_of_ceiling.tokens16384",
        title="fingerprint of 16,384 tokens against the read ceiling",
        unit="%",
        bench="ceiling",
        target=95,
        better="higher",
        prior=_OTHER_RUN + "7.2 us a token for one layer's K, which is 3 % of that ceiling",
    ),
    Row(
        name="forward_share_percent.bs1",
        title="share of an 8B model's shortest possible step, 1 row",
        unit="%",
        bench="forward",
        target=0.5,
        prior="SGLang's own figure for a 30B model, metadata only: 2.10",
    ),
    Row(
        name="forward_share_percent.bs64",
        title="share of an 8B model's shortest possible step, 64 rows",
        unit="%",
        bench="forward",
        target=0.6,
        prior="SGLang's own figure for a 30B model, metadata only: 0.52",
    ),
    Row(
        name="host_us.graph_replay",
        title="host time of a forward with its facts, graph replay",
        unit="us",
        bench="host",
        target=20,
        prior=_OTHER_RUN + "190 to 230, and it waits for the previous step",
    ),
    Row(
        name="host_us.eager",
        title="host time of a forward with its facts, eager",
        unit="us",
        bench="host",
        target=60,
        prior=_OTHER_RUN + "830 to 1,320",
    ),
    Row(
        name="host_return_ms.20_steps_of_5ms",
        title="launching thread returns after 20 steps, each behind a 5 ms spin",
        unit="ms",
        bench="host",
        target=5,
        prior=_OTHER_RUN + "95",
    ),
    Row(
        name="gpu_done_to_observer_ms.p99",
        title="GPU done to an async observer, interpreter idle, p99",
        unit="ms",
        bench="latency",
        part="stream",
        target=2,
        prior=_OTHER_RUN + "one step later",
    ),
    *(
        Row(
            name=f"gpu_done_to_observer_ms.{place}",
            title=f"the same, {words}",
            unit="ms",
            bench="latency",
            part="stream",
        )
        for place, words in _PLACES[1:]
    ),
    Row(
        name="growth_per_doubling.live_entries",
        title="cost when the live entries double, worst step",
        unit="x",
        bench="growth",
        target=2.2,
    ),
    Row(
        name="growth_per_doubling.new_tokens",
        title="cost when the new tokens double, worst step",
        unit="x",
        bench="growth",
        target=2.2,
    ),
    Row(
        name="growth_per_doubling.scrub_budget",
        title="cost when the scrub's budget doubles, worst step",
        unit="x",
        bench="growth",
        target=2.2,
    ),
    Row(
        name="growth_total.pool_1_to_100_gib",
        title="cost in a pool of 100 GiB against 1 GiB",
        unit="x",
        bench="growth",
        target=1.25,
    ),
    Row(
        name="false_alarms.10m_entries",
        title="reports on 10 million verified entries of clean random traffic",
        unit="reports",
        bench="detect",
        target=0,
    ),
    Row(
        name="missed_changes.fingerprint_100k",
        title="random single-word changes that the fingerprint missed, of 100,000",
        unit="changes",
        bench="detect",
        target=0,
    ),
    Row(
        name="missed_changes.scrub_100k",
        title="random single-word changes that the scrub missed, of 100,000",
        unit="changes",
        bench="detect",
        target=0,
    ),
    Row(
        name="engine_loss_percent.transformers_8b",
        title="tokens per second lost, transformers continuous batching, 8B shape",
        unit="%",
        bench="engine",
        target=0.5,
    ),
    Row(
        name="events_per_s.batch_sink",
        title="events through the folds to a batch sink, one core",
        unit="events/s",
        bench="stream",
        target=1_000_000,
        better="higher",
        needs="cpu",
    ),
    Row(
        name="events_per_s.decode_traffic",
        title="the same with the events of decode traffic, folds at work",
        unit="events/s",
        bench="stream",
        better="higher",
        needs="cpu",
    ),
    Row(
        name="events_per_s.json_lines",
        title="events as JSON lines, one core",
        unit="events/s",
        bench="stream",
        target=120_000,
        better="higher",
        needs="cpu",
    ),
    Row(
        name="events_per_s.journal",
        title="events of decode traffic into the journal, one core",
        unit="events/s",
        bench="stream",
        target=500_000,
        better="higher",
        needs="cpu",
    ),
    Row(
        name="engine_thread_loss_percent.1000_requests",
        title="engine thread's throughput lost to facts and drain, 1,000 requests x 50 steps/s",
        unit="%",
        bench="engine_thread",
        part="stream",
        target=1,
        needs="cpu",
        prior="one fact per request and step, measured in an earlier run: 10.7",
    ),
    *(
        Row(
            name=f"engine_thread_loss_percent.{name}",
            title=f"the same with {words}",
            unit="%",
            bench="engine_thread",
            part="stream",
            target=target,
            needs="cpu",
        )
        for name, words, target in (
            ("4_observers", "4 observers of everything", None),
            ("16_observers", "16 observers of everything", None),
            ("blocked_sink", "a sink that blocks for ever beside the observer", 1),
        )
    ),
    Row(
        name="engine_thread_loss_percent.in_trouble",
        title="beside a sink that blocks for ever and a full disk, against the same watch without them",
        unit="%",
        bench="trouble",
        part="stream",
        target=1,
        needs="cpu",
    ),
    *(
        Row(
            name=f"snapshot_to_observer_ms.{place}",
            title=f"a snapshot that is ready to an async observer, {words}",
            unit="ms",
            bench="observing",
            part="stream",
            target=2 if place == "p99" else None,
            needs="cpu",
        )
        for place, words in _PLACES
    ),
    Row(
        name="ledger_step_us.1000_requests",
        title="the ledger's work for a step of overlapped decode traffic, 1,000 requests",
        unit="us",
        bench="ledger",
        needs="cpu",
    ),
    Row(
        name="record_bytes_per_slot",
        title="memory per slot and group",
        unit="B",
        bench="footprint",
        target=32,
        needs="cpu",
        prior=_OTHER_RUN + "128",
    ),
    Row(
        name="mode_off_traces",
        title="modules imported and attributes wrapped with mode=off",
        unit="traces",
        bench="footprint",
        target=0,
        needs="cpu",
    ),
)


def choose(patterns: Sequence[str]) -> tuple[Row, ...]:
    """Rows whose name is one of the patterns, or starts with it, or matches it (``*`` as in a shell).

    A whole name means that row alone, also where others begin with it. All rows without patterns.

    Raises:
        ConfigError: a pattern matches nothing; names near ones.
    """
    if not patterns:
        return ROWS
    for pattern in patterns:
        if not any(_matches(row, pattern) for row in ROWS):
            known = [row.name for row in ROWS]
            heads = sorted({row.name.partition(".")[0] for row in ROWS})
            near = difflib.get_close_matches(pattern, [*known, *heads], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(heads)}"
            raise ConfigError(f"no row of the bench matches {pattern!r}; {hint}")
    return tuple(row for row in ROWS if any(_matches(row, pattern) for pattern in patterns))


def _matches(row: Row, pattern: str) -> bool:
    if any(other.name == pattern for other in ROWS):
        return row.name == pattern
    return row.name.startswith(pattern) or pattern in (row.bench, row.part) or fnmatch.fnmatchcase(row.name, pattern)
