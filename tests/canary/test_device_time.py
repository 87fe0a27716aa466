"""The canary's own device time: reported once a sample, and unknown where nothing measures it."""

from __future__ import annotations

from collections.abc import Callable

from kvcanary.decode import Decoder
from kvcanary.snapshot import Fence, Snapshot
from kvcanary.state import Word
from tests.canary.conftest import Bench
from tests.canary.test_findings import serve


def taken(bench: Bench, *samples: tuple[int, int]) -> list[float | None]:
    """What a decoder makes of headers with (forward, nanoseconds) of the newest sample."""
    state, found = bench.canary.state, []
    decoder = Decoder(bench.engine.layout, lambda _tag: "")
    for forward, (timed, spent) in enumerate(samples, 1):
        words = state.counters.tolist()
        words[Word.FORWARD], words[Word.GPU_FORWARD], words[Word.GPU_NS] = forward, timed, spent
        fence = Fence(forward, None, 0, 0, {})
        found.append(decoder.snapshot(Snapshot(fence, words, [], [], 0), 1, 1).gpu_us)
    return found


def test_a_sample_is_reported_once_in_microseconds(bench: Bench) -> None:
    assert taken(bench, (0, 0), (2, 12_500), (2, 12_500), (2, 12_500), (5, 900)) == [None, 12.5, None, None, 0.9]


def test_it_is_unknown_and_never_0_where_there_is_no_gpu_clock(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(gpu_time_every=1, stats_every=2)
    serve(bench, steps=5)
    assert {snapshot.gpu_us for snapshot in bench.of("SnapshotTaken")} == {None}
    assert {report.gpu_us_per_forward for report in bench.of("StatsReported")} == {None}
