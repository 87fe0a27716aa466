from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cyclopts import App

from kvcanary.bus import Bus
from kvcanary.cli import bench as command
from kvcanary.cli.bench import bench, exit_status
from kvcanary.cli.benches import growth, plot, running, stream, workload
from kvcanary.cli.benches.ceiling import read_ceiling
from kvcanary.cli.benches.detect import measure as measure_detection
from kvcanary.cli.benches.engine_loop import FINISH_EVERY, EngineLoop
from kvcanary.cli.benches.engine_thread import STEPS
from kvcanary.cli.benches.observing import percentile
from kvcanary.cli.benches.pool import make_pool
from kvcanary.cli.benches.reading import read_all
from kvcanary.cli.benches.rows import ROWS, BenchError, Measured, Row, choose
from kvcanary.cli.benches.running import Outcome, Setting, run
from kvcanary.cli.benches.stream import make_events, make_started
from kvcanary.cli.benches.timing import make_timer
from kvcanary.cli.benches.traffic import Addressing, Traffic
from kvcanary.cli.benches.workload import Shape, Workload, make_workload, read_counts
from kvcanary.config import CanaryConfig
from kvcanary.errors import ConfigError
from kvcanary.events import (
    HealthChecked,
    IncidentOpened,
    KernelStalled,
    ObserverFailed,
    OwnershipViolated,
    RequestsFinished,
    StatsReported,
    ViolationDetected,
)
from kvcanary.kernels import FactOp, load_kernels
from kvcanary.layout import DEFAULT_PART
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds
from kvcanary.record import make_keys
from kvcanary.state import DeviceState, Limits, Word
from kvcanary.testing import EventRecorder

ON_A_GPU = [row for row in ROWS if row.needs == "cuda"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rehearsal() -> Setting:
    return Setting("cpu", rehearse=True)


def small_workload(setting: Setting, shape: Shape) -> Workload:
    return make_workload(make_pool(60, setting), shape, slots=256, scrub_bytes=512, chunk=64)


# --- rows and the form of the report ----------------------------------------------------------------------------


def test_row_names_are_unique_and_every_target_of_the_design_has_a_row() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    targets = {row.name: row.target for row in ROWS}
    assert targets["decode_added_us.bs128_ctx1024"] == 25
    assert targets["decode_added_us.bs1_ctx512"] == 18
    assert targets["prefill_added_us.tokens16384"] == 410
    assert targets["host_us.graph_replay"] == 20
    assert targets["record_bytes_per_slot"] == 32


@pytest.mark.parametrize(("better", "value", "holds"), [("lower", 9, True), ("lower", 11, False), ("higher", 11, True)])
def test_a_value_holds_on_the_right_side_of_its_target(better: str, value: float, holds: bool) -> None:
    row = Row(name="x", title="", unit="us", bench="x", target=10, better=better)  # type: ignore[arg-type]
    assert row.holds(value) is holds


def test_a_row_without_a_target_neither_holds_nor_misses() -> None:
    outcome = Outcome(Row(name="x", title="", unit="us", bench="x"), Measured(name="x", value=3, method="m"))
    assert outcome.holds is None
    assert exit_status([outcome]) == 0


def test_on_a_cpu_rows_of_a_gpu_are_listed_with_the_reason_and_never_hold() -> None:
    outcomes = list(run(ON_A_GPU, Setting("cpu")))
    assert [o.row.name for o in outcomes] == [row.name for row in ON_A_GPU]
    for outcome in outcomes:
        plain = outcome.as_json()
        assert plain["value"] is None
        assert plain["holds"] is False
        assert "CUDA" in plain["reason"]
    assert exit_status(outcomes) == 0, "a row that cannot run here is no miss"


def test_a_row_that_fails_keeps_the_others_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_setting: Setting, name: str) -> Measured:
        if name == "broken":
            raise BenchError("3 violations on clean data")
        return Measured(name=name, value=1.0, method="counted")

    monkeypatch.setattr(running, "load_bench", lambda _name: measure)
    rows = [Row(name=name, title="", unit="us", bench="b", target=2, needs="cpu") for name in ("broken", "fine")]
    broken, fine = run(rows, Setting("cpu"))
    assert "3 violations" in broken.reason
    assert broken.holds is False
    assert fine.holds is True
    assert exit_status([fine]) == 0
    assert exit_status([broken, fine]) == 1


def test_a_missed_target_is_exit_status_one() -> None:
    row = Row(name="x", title="", unit="us", bench="x", target=10)
    assert exit_status([Outcome(row, Measured(name="x", value=11, method=""))]) == 1


def test_the_json_report_has_the_fixed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    status = bench(only=("record_bytes_per_slot", "mode_off_traces", "verify_us"), device="cpu", json=True, out=out)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["machine"]["versions"]["torch"] == torch.__version__
    rows = {row["name"]: row for row in printed["rows"]}
    assert all({"name", "value", "unit", "target", "holds"} <= row.keys() for row in rows.values())
    assert rows["record_bytes_per_slot"]["value"] == 32
    assert rows["record_bytes_per_slot"]["holds"] is True
    assert rows["mode_off_traces"]["value"] == 0
    assert rows["verify_us.entries2m_page16"]["holds"] is False
    assert status == 0


def test_the_table_names_values_and_what_did_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(only=("record_bytes_per_slot", "verify_us.entries2m_page1"), device="cpu") == 0
    printed = capsys.readouterr().out
    assert "32 B" in printed
    assert "needs a CUDA device" in printed
    assert "other runs" in printed


def test_list_measures_nothing_and_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(list=True) == 0
    printed = capsys.readouterr().out
    assert all(row.name in printed for row in ROWS)


def test_the_command_line_takes_several_patterns(capsys: pytest.CaptureFixture[str]) -> None:
    app = App(result_action="return_value")
    app.command(bench)
    assert app(["bench", "--list", "--json", "--only", "host_us", "--only", "growth*"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert names == [row.name for row in ROWS if row.name.startswith(("host_us", "growth"))]


def test_an_unknown_row_is_refused_with_a_near_match() -> None:
    with pytest.raises(ConfigError, match="did you mean 'decode_added_us"):
        choose(["decode_add_us"])


def test_a_whole_name_means_that_row_alone() -> None:
    assert [row.name for row in choose(["verify_us.entries2m_page1"])] == ["verify_us.entries2m_page1"]
    assert len(choose(["verify_us"])) == 2


def test_a_row_that_lacks_a_package_is_not_run_and_one_that_is_broken_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = Row(name="x", title="", unit="us", bench="b", needs="cpu")

    def lacking(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(running, "load_bench", lambda _name: lacking("transformers"))
    (without,) = run([row], Setting("cpu"))
    monkeypatch.setattr(running, "load_bench", lambda _name: lacking("kvcanary.gone"))
    (broken,) = run([row], Setting("cpu"))
    assert (without.failed, broken.failed) == (False, True)


def test_cuda_where_there_is_none_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        bench(only=("record_bytes_per_slot",), device="cuda")


def test_a_file_without_a_directory_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("it measured"))
    with pytest.raises(ConfigError, match="no directory"):
        bench(only=("record_bytes_per_slot",), device="cpu", out=tmp_path / "none" / "x.json")


# --- what is timed is the right work ------------------------------------------------------------------------


def test_a_workload_is_clean_and_counts_every_entry(rehearsal: Setting) -> None:
    built = small_workload(rehearsal, Shape(3, 40))
    before = built.counts()
    for _ in range(5):
        built.enter()
        built.leave()
    after = built.judge(before)
    assert after.links - before.links == 5 * 3 * 40
    assert after.row_ends - before.row_ends == 5 * 3
    assert after.sealed - before.sealed == 5 * 3
    assert after.content > before.content


def test_every_slot_of_the_pool_is_sealed_so_that_the_scrub_finds_work(rehearsal: Setting) -> None:
    built = small_workload(rehearsal, Shape(2, 16, page_size=16))
    built.enter()
    built.leave()
    written = (built.state.groups[0].seals[0, :, 1] & 0xFFFF_FFFF) != 0
    # All but the rest of the two pages that the new tokens have begun.
    assert int(written.sum()) == 256 - 2 * 15


def test_a_changed_record_makes_the_figure_worthless(rehearsal: Setting) -> None:
    built = small_workload(rehearsal, Shape(3, 40))
    before = built.counts()
    slot = int(built.batch.groups[0].table.entries[1, 7])  # type: ignore[union-attr]
    built.state.groups[0].links[slot, 0] ^= 1
    built.enter()
    built.leave()
    with pytest.raises(BenchError, match="violations on clean data"):
        built.judge(before)


def test_work_that_did_not_run_is_noticed(rehearsal: Setting) -> None:
    built = small_workload(rehearsal, Shape(3, 40))
    before = built.counts()
    with pytest.raises(BenchError, match="nothing ran"):
        built.judge(before)
    built.leave()
    with pytest.raises(BenchError, match="links: 0 counted"):
        built.judge(before)


@pytest.mark.parametrize(
    "name",
    [
        "read_ceiling_gb_s",
        "fingerprint_percent_of_ceiling.tokens16384",
        "decode_added_us.bs128_ctx1024",
        "decode_added_us.bs8_ctx131072_page16",
        "prefill_added_us.tokens16384",
        "verify_us.entries2m_page1",
        "forward_share_percent.bs64",
        "host_us.graph_replay",
        "host_us.eager",
        "host_return_ms.20_steps_of_5ms",
        "gpu_done_to_observer_ms.p99",
        "gpu_done_to_observer_ms.p99_9_busy_python",
        "snapshot_to_observer_ms.p50",
        "growth_per_doubling.live_entries",
        "growth_total.pool_1_to_100_gib",
    ],
)
def test_a_rehearsal_runs_the_row_and_judges_nothing(name: str, rehearsal: Setting) -> None:
    (outcome,) = run(choose([name]), rehearsal)
    assert outcome.reason == ""
    assert outcome.measured is not None
    assert outcome.measured.method
    assert outcome.holds is False
    assert outcome.as_json()["rehearsal"] is True


def test_the_engine_loop_serves_clean_traffic_through_a_real_canary(rehearsal: Setting) -> None:
    seen = EventRecorder(ViolationDetected, IncidentOpened, RequestsFinished)
    loop = EngineLoop(rehearsal, observers=[seen], steps=4 * FINISH_EVERY)
    for _ in range(4 * FINISH_EVERY):
        loop.step(loop.prepare())
    links = read_counts(loop.canary.state).links
    loop.close()
    assert links > 4 * FINISH_EVERY * 4 * 20
    assert [type(event) for event in seen.events if not isinstance(event, RequestsFinished)] == []
    assert sum(len(e.requests) for e in seen.events if isinstance(e, RequestsFinished)) == 4


# --- traffic and detection ----------------------------------------------------------------------------------


def serve(seed: int, addressing: Addressing, forwards: int) -> DeviceState:
    setting = Setting("cpu", rehearse=True)
    pool = make_pool(100, setting)
    layout = pool.layout(addressing.pages * addressing.page_size, addressing.page_size)
    state = DeviceState(layout, make_keys(seed), Limits(max_tokens=400, max_batch_rows=8, max_rows=5))
    state.counters[Word.ARMED] = 1
    kernels = load_kernels("reference", "cpu")
    traffic = Traffic([addressing], state.keys, random.Random(seed))
    for _ in range(forwards):
        forward = traffic.next()
        if forward.facts:
            kernels.facts(state, forward.facts)
        kernels.mark(state, forward.batch, (0,), first=True)
        kernels.check(state, forward.batch, (0,))
        kernels.seal(state, DEFAULT_PART, 2048, last=True, nonfinite=True)
    return state


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1, 16])
def test_random_traffic_is_clean_and_is_verified_to_the_row_ends(seed: int, size: int) -> None:
    counts = read_counts(serve(seed, Addressing(page_size=size, pages=1000 // size + 6), 60))
    assert counts.kinds == {}
    assert counts.links > 2000
    assert counts.row_ends > 50


def test_random_traffic_shares_prefixes_frees_pages_and_goes_back() -> None:
    traffic = Traffic([Addressing(page_size=4, pages=300)], make_keys(1), random.Random(2))
    forwards = [traffic.next() for _ in range(120)]
    facts = [fact for forward in forwards for fact in forward.facts]
    assert any(fact.op == FactOp.ADMIT and fact.position > 0 for fact in facts)
    assert any(fact.op == FactOp.FREE for fact in facts)
    lengths: dict[int, int] = {}
    went_back = False
    for row in (row for forward in forwards for row in forward.rows):
        went_back |= row.context < lengths.get(row.request.tag, 0)
        lengths[row.request.tag] = row.context + row.new
    assert went_back


@pytest.mark.parametrize("name", ["missed_changes.fingerprint_100k", "missed_changes.scrub_100k"])
def test_every_changed_word_is_detected(name: str, rehearsal: Setting) -> None:
    measured = measure_detection(rehearsal, name)
    assert measured.value == 0
    assert measured.details == {"changes": 100, "detected": 100}


def test_a_fingerprint_that_overlooks_a_change_is_counted_as_missed(
    rehearsal: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = load_kernels("reference", "cpu")

    def blind(state: DeviceState, group: int, part: str, slots: torch.Tensor) -> torch.Tensor:
        found = reference(state, group, part, slots)
        found[0] = state.groups[group].seals[0, slots[0], 0]
        return found

    reference, kernels.fingerprint = kernels.fingerprint, blind  # type: ignore[method-assign]
    monkeypatch.setattr(workload, "load_kernels", lambda *_: kernels)
    measured = measure_detection(rehearsal, "missed_changes.fingerprint_100k")
    assert measured.value == 2, "one in each of the two batches"


# --- the stream ---------------------------------------------------------------------------------------------


def test_the_events_of_the_stream_rows_are_traffic_without_a_fault() -> None:
    bus = Bus(default_folds(CanaryConfig(mode="log"), Mailbox()))
    out = [*bus.begin_run(make_started()), *bus.publish(make_events(3000))]
    wrong = (IncidentOpened, OwnershipViolated, KernelStalled, ObserverFailed)
    assert [event for event in out if isinstance(event, wrong)] == []
    assert sum(isinstance(event, StatsReported) for event in out) >= 3
    assert all(event.healthy for event in out if isinstance(event, HealthChecked))


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.bench == "stream"])
def test_every_event_reaches_the_sink_that_is_measured(name: str, rehearsal: Setting) -> None:
    (outcome,) = run(choose([name]), rehearsal)
    assert outcome.reason == ""
    assert outcome.measured is not None
    assert outcome.measured.value > 0


def test_a_sink_that_loses_events_makes_the_figure_worthless(
    rehearsal: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream.CountingSink, "handle_batch", lambda _sink, _events: 1 / 0)
    (outcome,) = run(choose(["events_per_s.batch_sink"]), rehearsal)
    assert outcome.failed
    assert "the sink took" in outcome.reason


def test_the_engine_thread_row_publishes_what_its_engine_records(rehearsal: Setting) -> None:
    (outcome,) = run(choose(["engine_thread_loss_percent.1000_requests"]), rehearsal)
    assert outcome.reason == ""
    assert outcome.measured is not None
    assert outcome.measured.details["events"] > 4 * STEPS


# --- growth -------------------------------------------------------------------------------------------------


def test_a_sink_that_blocks_for_ever_is_measured_beside_one_that_does_not(rehearsal: Setting) -> None:
    (outcome,) = run(choose(["engine_thread_loss_percent.blocked_sink"]), rehearsal)
    assert outcome.measured is not None
    details = outcome.measured.details
    assert details["events"] > 0
    assert details["stopped_cleanly"] is False
    assert details["seconds_to_stop"] < 6


def test_a_watch_in_trouble_is_measured_beside_one_that_is_not(rehearsal: Setting) -> None:
    (outcome,) = run(choose(["engine_thread_loss_percent.in_trouble"]), rehearsal)
    assert outcome.reason == ""
    assert outcome.measured is not None
    details = outcome.measured.details
    assert min(details["dropped"].values()) > 0
    assert details["stopped_cleanly"] is False
    assert details["seconds_to_stop"] < details["deadline_s"] + 0.5


def test_only_stream_shows_all_that_concerns_the_stream() -> None:
    names = [row.name for row in choose(["stream"])]
    heads = {name.partition(".")[0] for name in names}
    assert heads == {"gpu_done_to_observer_ms", "events_per_s", "engine_thread_loss_percent", "snapshot_to_observer_ms"}
    assert {"snapshot_to_observer_ms.p99_9", "engine_thread_loss_percent.16_observers"} <= set(names)


def test_places_of_a_distribution_are_samples_of_it() -> None:
    samples = [float(n) for n in range(1000)]
    assert [percentile(samples, place) for place in (50, 99, 99.9, 100)] == [500, 990, 999, 999]


def test_growth_is_judged_by_its_worst_doubling(rehearsal: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = iter([10.0, 12.0, 30.0, 45.0])
    monkeypatch.setattr(growth, "_series", lambda *_: [(x, next(costs)) for x in (1, 2, 4, 8)])
    measured = growth.measure(rehearsal, "growth_per_doubling.new_tokens")
    assert measured.value == 2.5
    assert measured.series == [
        {"x": x, "us": cost, "unit": "tokens"} for x, cost in ((1, 10.0), (2, 12.0), (4, 30.0), (8, 45.0))
    ]


def test_a_plot_without_a_series_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no row with a series"):
        plot.plot_growth([{"name": "record_bytes_per_slot"}], tmp_path / "x.png")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    row = {"name": "growth.x", "series": [{"x": 1, "us": 2.0, "unit": "tokens"}]}
    with pytest.raises(ConfigError, match=r"pip install 'kvcanary\[plot\]'"):
        plot.plot_growth([row], tmp_path / "x.png")


# --- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cold_time_of_a_plain_read_is_its_size_over_the_read_ceiling() -> None:
    setting = Setting("cuda", quick=True)
    ceiling = read_ceiling(setting).value
    buffer = torch.randint(1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    microseconds = make_timer(setting).cold(lambda: read_all(buffer))
    assert microseconds == pytest.approx(buffer.numel() * 4 / ceiling / 1000, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_rehearsal_runs_every_row_of_it() -> None:
    outcomes = list(run([row for row in ON_A_GPU if row.bench != "engine"], Setting("cuda", rehearse=True)))
    assert {outcome.row.name: outcome.reason for outcome in outcomes if outcome.reason} == {}
