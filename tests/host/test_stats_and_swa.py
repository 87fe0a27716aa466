"""Numbers that people plot, and the proof that the window path ran."""

from __future__ import annotations

from typing import Any

from kvcanary.events import (
    Event,
    EventsDropped,
    FactsLost,
    Origin,
    RunStarted,
    SnapshotsSkipped,
    SnapshotTaken,
    StatsReported,
    SwaDivergenceObserved,
    json_codec,
)
from kvcanary.observers.stats import StatsFold
from kvcanary.observers.swa_divergence import SwaDivergenceFold, find_all, find_last, parse

STARTED = RunStarted(run="r", origin=Origin(), roles=("mark", "check", "seal", "scrub"))
SAMPLE: dict[str, Any] = {
    "forward_ct": 4,
    "verify_full": 100,
    "verify_swa": 40,
    "swa_full_idx_divergence": 3,
    "swa_out_of_window_tokens": 60,
}
OBSERVED = SwaDivergenceObserved(seq=9, time_ns=1_700_000_000_123_456_789, forward=4, cause=8, by="x", **SAMPLE)


def snapshot(forward: int, **fields: Any) -> SnapshotTaken:
    return SnapshotTaken(forward=forward, **fields)


def stats(fold: StatsFold, *events: Event) -> list[StatsReported]:
    return [report for event in (STARTED, *events) for report in fold.handle(event)]


def test_a_report_comes_with_the_first_snapshot_of_each_period() -> None:
    reports = stats(StatsFold(10), *[snapshot(forward) for forward in (1, 9, 12, 19, 20, 21, 55, 60)])
    assert [report.forward for report in reports] == [12, 20, 55, 60]


def test_zero_switches_the_reports_off() -> None:
    assert not stats(StatsFold(0), *[snapshot(forward) for forward in range(1, 300)])


def test_counts_are_totals_over_all_groups() -> None:
    (report,) = stats(
        StatsFold(1),
        FactsLost(count=2),
        SnapshotsSkipped(count=3),
        EventsDropped(observer="slow", count=4, first_seq=1, last_seq=4),
        snapshot(
            1,
            seq=5,
            new_tokens=77,
            verified={"links": {"full": 5, "swa": 6}},
            unverified={"unlinked": {"full": 1, "swa": 0}},
            violations={"CONTENT": 1},
            violations_dropped=9,
        ),
    )
    assert (report.cause, report.by, report.protected_tokens) == (5, "stats", 77)
    assert report.verified == {"links": 11}
    assert report.unverified == {"unlinked": 1}
    assert report.violations == {"CONTENT": 1}
    losses = (report.violations_dropped, report.facts_lost, report.snapshots_skipped, report.events_dropped)
    assert losses == (9, 2, 3, 4)


def test_costs_are_means_and_lag_is_the_worst_of_the_period() -> None:
    first, second = stats(
        StatsFold(2),
        snapshot(1, host_us=10.0, lag_us=500.0),
        snapshot(2, host_us=20.0, lag_us=9000.0, gpu_us=7.0),
        snapshot(3, host_us=2.0, lag_us=100.0),
        snapshot(4, host_us=4.0, lag_us=200.0),
    )
    assert (first.host_us_per_forward, first.lag_ms, first.gpu_us_per_forward) == (15.0, 9.0, 7.0)
    assert (second.host_us_per_forward, second.lag_ms, second.gpu_us_per_forward) == (3.0, 0.2, None)


def test_a_role_is_active_when_it_ran_in_the_period() -> None:
    first, second = stats(
        StatsFold(1),
        snapshot(1, launches={"mark": 1, "check": 1, "window": 0}),
        snapshot(2, launches={"mark": 2, "check": 1, "window": 0}),
    )
    assert (first.active_roles, first.all_roles) == (2, 4)
    assert second.active_roles == 1


def test_the_age_of_the_oldest_byte_is_bounded_by_the_pass_before() -> None:
    def scrubbed(forward: int, passes: int, began: int) -> SnapshotTaken:
        return snapshot(forward, scrub_passes={"full": passes}, scrub_pass_forwards={"full": began})

    ages = [
        report.oldest_unscrubbed_forwards["full"]
        for report in stats(
            StatsFold(1),
            scrubbed(1, 0, 1),
            scrubbed(30, 0, 1),
            scrubbed(41, 1, 40),
            scrubbed(70, 1, 40),
            scrubbed(81, 2, 80),
        )
    ]
    assert ages == [0, 29, 40, 69, 41]


def test_a_sample_of_the_window_is_observed_once() -> None:
    fold = SwaDivergenceFold()
    events = [snapshot(3), snapshot(4, seq=8, swa=SAMPLE), snapshot(5, swa=SAMPLE)]
    found = [event for given in (STARTED, *events) for event in fold.handle(given)]
    assert found == [SwaDivergenceObserved(forward=4, cause=8, by="swa_divergence", **SAMPLE)]


def test_a_new_run_may_begin_with_a_smaller_forward() -> None:
    fold = SwaDivergenceFold()
    fold.handle(snapshot(4, swa=SAMPLE))
    fold.handle(STARTED)
    assert fold.handle(snapshot(4, swa=SAMPLE))


def test_the_json_of_the_event_parses_back() -> None:
    assert parse(json_codec().encode(OBSERVED)) == OBSERVED
    assert parse("INFO 12:00 worker-3 | " + json_codec().encode(OBSERVED).decode()) == OBSERVED


def test_lines_that_are_no_observation_are_none() -> None:
    line = json_codec().encode(OBSERVED).decode()
    for other in (
        "",
        "plain text",
        '{"event": "stats.reported"}',
        line[:-5],
        line.replace("100", '"many"'),
        f"[{line}]",
    ):
        assert parse(other) is None
    assert parse('{"event": "stats.reported", "note": "swa.divergence_observed"}') is None


def test_all_and_the_last_are_found_in_a_text_and_in_lines() -> None:
    codec = json_codec()
    lines = [
        codec.encode(OBSERVED).decode(),
        "noise",
        codec.encode(SwaDivergenceObserved(**SAMPLE | {"forward_ct": 8})).decode(),
    ]
    assert [found.forward_ct for found in find_all("\n".join(lines))] == [4, 8]
    assert [found.forward_ct for found in find_all("\r\n".join(lines).encode())] == [4, 8]
    last = find_last(lines)
    assert last is not None
    assert last.forward_ct == 8
    assert find_last("noise") is None
