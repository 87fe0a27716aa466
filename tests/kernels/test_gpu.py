"""What only a GPU can show: graphs, streams, large pools, compilations, the GPU's clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.triton_rig import CUDA, assert_same, make_kernels

# Above: before triton can be loaded.
# isort: split
from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.kernels import DeviceFact, FactOp, Kernels
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout
from kvcanary.record import Kind, make_keys
from kvcanary.state import (
    SCRUB_CURSOR,
    VERIFIED,
    Check,
    DeviceState,
    Limits,
    PoisonMode,
    ViolationWord,
    Word,
    group_base,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

DEVICE = "cuda"
PAGE, HEADS, DIM, LAYERS = 16, 4, 64, 3
ROWS, WIDTH = 8, 12
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 2
SPIN = 20_000_000
"""cycles, some ten milliseconds"""


class Decoder:
    """A decoding engine whose tensors never move, as those of a captured graph: one token a row and forward."""

    def __init__(self, poison: PoisonMode = "off", *, every: int = 0, pages: int = 128) -> None:
        self.random = torch.Generator(DEVICE).manual_seed(1)
        self.pool = torch.randn(LAYERS, 2, pages, PAGE, HEADS, DIM, generator=self.random, device=DEVICE).bfloat16()
        sources = tuple(
            KVSource.from_view(f"{part}{layer}", self.pool[layer, i], layer=layer, component=part)
            for layer in range(LAYERS)
            for i, part in enumerate("kv")
        )
        group = AttentionGroup(
            "full", "full", pages * PAGE, PAGE, sources, trash_pages=(0,), offset_follows_position=True
        )
        self.layout = PoolLayout((group,))
        self.limits = Limits(
            max_tokens=ROWS, max_batch_rows=ROWS, max_rows=ROWS, poison=poison, gpu_time_every=every, snapshots=8
        )
        self.keys = make_keys(5)
        self.length = [0] * ROWS
        self.pages = [[1 + row * WIDTH + i for i in range(WIDTH)] for row in range(ROWS)]
        self.ids = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
        self.starts = torch.zeros(ROWS + 1, dtype=torch.int32, device=DEVICE)
        self.contexts = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
        self.rows = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
        self.slots = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
        self.table = torch.zeros(ROWS, WIDTH, dtype=torch.int32, device=DEVICE)
        self.live = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.values = torch.zeros(LAYERS, 2, ROWS, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
        item = GroupBatch(slot_mapping=self.slots, table=PageTable(entries=self.table))
        self.batch = ForwardBatch(
            input_ids=self.ids,
            query_start_loc=self.starts,
            context_lens=self.contexts,
            request_rows=self.rows,
            groups=(item,),
            num_requests=self.live,
        )

    def new_state(self) -> DeviceState:
        state = DeviceState(self.layout, self.keys, self.limits)
        state.counters[Word.ARMED] = 1
        return state

    def admission(self) -> list[DeviceFact]:
        return [
            fact
            for row in range(ROWS)
            for fact in (
                DeviceFact(FactOp.ADMIT, row=row, tag=row + 1, seed=self.keys.seed),
                DeviceFact(FactOp.ALLOC, pages=self.pages[row], tag=row + 1),
            )
        ]

    def load(self, chosen: list[int]) -> None:
        """Put the next token of each of the ``chosen`` rows into the tensors; the rest becomes padding."""
        count = len(chosen)
        self.ids.random_(0, 1 << 17, generator=self.random)
        self.values.normal_(generator=self.random)
        where = [self.pages[row][self.length[row] // PAGE] * PAGE + self.length[row] % PAGE for row in chosen]
        padding = ROWS - count
        self.starts.copy_(torch.tensor([*range(count + 1), *[count] * padding]))
        self.contexts.copy_(torch.tensor([self.length[row] for row in chosen] + [0] * padding))
        self.rows.copy_(torch.tensor(chosen + [0] * padding))
        self.slots.copy_(torch.tensor(where + [0] * padding))
        self.table.copy_(torch.tensor([self.pages[row] for row in chosen] + [[0] * WIDTH] * padding))
        self.live.fill_(count)
        for row in chosen:
            self.length[row] += 1

    def write(self) -> None:
        """The model's writes; padding goes to the trash page."""
        pages, offsets = self.slots // PAGE, self.slots % PAGE
        for layer in range(LAYERS):
            self.pool[layer, :, pages, offsets] = self.values[layer]

    def forward(self, kernels: Kernels, state: DeviceState, *, scrub: int = 40, write: bool = True) -> None:
        mode = self.limits.poison
        kernels.mark(state, self.batch, [0], first=True, poison="target" if mode != "off" else "")
        kernels.check(state, self.batch, [0])
        if write:
            self.write()
        kernels.seal(state, "target", scrub * TOKEN_BYTES, last=True, nonfinite=True, poison=mode)

    def capture(self, kernels: Kernels, state: DeviceState) -> Any:
        kernels.prepare(state)
        self.write()  # what torch makes at its first call must not be made in the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward(kernels, state)
        return graph


def found(state: DeviceState) -> list[str]:
    torch.cuda.synchronize()
    rows = state.violations[: int(state.counters[Word.STORED])].tolist()
    return [Kind(row[ViolationWord.KIND]).name for row in rows]


SIZES = [[0], [0, 1, 2], list(range(8)), [7, 3], [5], [1, 2, 3, 4, 5, 6, 7], list(range(8))]


@pytest.mark.parametrize("poison", ["off", "sample", "full"])
def test_one_graph_follows_live_sizes_and_the_scrub_s_window(poison: PoisonMode) -> None:
    engine = Decoder(poison)
    kernels, reference = make_kernels(), ReferenceKernels()
    replayed, wanted = engine.new_state(), engine.new_state()
    for each, state in ((kernels, replayed), (reference, wanted)):
        each.facts(state, engine.admission())
    engine.load([])
    graph = engine.capture(kernels, replayed)
    cursors = []
    for chosen in SIZES:
        engine.load(chosen)
        engine.forward(reference, wanted)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(replayed, wanted, exact=False)
        cursors.append(int(replayed.counters[group_base(0) + SCRUB_CURSOR]))
    assert len(set(cursors)) == len(SIZES)
    assert found(replayed) == []
    words = replayed.counters.tolist()
    assert words[Word.NEW_TOKENS] == sum(map(len, SIZES))
    assert words[group_base(0) + VERIFIED + Check.LINKS] > 0
    if poison != "off":
        assert words[group_base(0) + VERIFIED + Check.WRITTEN] == sum(map(len, SIZES))


def test_a_replay_that_loses_its_writes_is_named() -> None:
    engine = Decoder("sample")
    kernels, state = make_kernels(), engine.new_state()
    kernels.facts(state, engine.admission())
    kernels.prepare(state)
    engine.load([])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.forward(kernels, state, write=False)
    for chosen in ([0, 1], [2]):
        engine.load(chosen)
        graph.replay()
    assert found(state) == ["WRITE_MISSING"] * 3


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_the_gpu_s_clock_times_every_third_forward(captured: bool) -> None:
    engine = Decoder(every=3)
    kernels, state = make_kernels(), engine.new_state()
    kernels.facts(state, engine.admission())
    engine.load([])
    graph = engine.capture(kernels, state) if captured else None
    samples = []
    for _ in range(9):
        engine.load([0, 1, 2])
        if graph is None:
            engine.forward(kernels, state)
        else:
            graph.replay()
        words = state.counters.tolist()
        samples.append((words[Word.FORWARD] - 1, words[Word.GPU_FORWARD], words[Word.GPU_NS]))
        assert words[Word.CLOCK_BEGAN] == 0
    assert [timed for _, timed, _ in samples] == [forward // 3 * 3 for forward, _, _ in samples]
    spent = {timed: ns for _, timed, ns in samples if timed}
    assert len(spent) == 3
    assert all(1_000 < ns < 50_000_000 for ns in spent.values()), spent


# --- nothing waits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_no_forward_waits_for_the_one_before(captured: bool) -> None:
    engine = Decoder("sample", every=2)
    kernels, state = make_kernels(), engine.new_state()
    kernels.facts(state, engine.admission())
    engine.load([])
    graph = engine.capture(kernels, state) if captured else None
    engine.load(list(range(8)))
    engine.forward(kernels, state)
    pages = torch.tensor(engine.pages[0][-2:], device=DEVICE)
    kernels.facts(state, [DeviceFact(FactOp.QUEUE, pages=pages), DeviceFact(FactOp.QUEUE, pages=engine.pages[1][-2:])])
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for _ in range(20):
        torch.cuda._sleep(SPIN)
        kernels.facts(state, [DeviceFact(FactOp.QUEUE, pages=pages), DeviceFact(FactOp.OWN, pages=[3], tag=1)])
        if graph is None:
            engine.forward(kernels, state)
        else:
            graph.replay()
    done.record()
    assert not done.query(), "the host was held up until the device was done"
    torch.cuda.synchronize()


def test_no_step_of_a_canary_waits_for_the_one_before() -> None:
    from kvcanary.canary import Canary
    from kvcanary.config import CanaryConfig
    from kvcanary.testing import EventRecorder

    engine, recorder = Decoder(), EventRecorder()
    config = CanaryConfig(mode="log", poison="full", gpu_time_every=5, scrub_mib_per_step=0.1)
    canary = Canary(config, observers=[recorder]).start()
    try:
        canary.bind(engine.layout, max_tokens=ROWS, max_batch_rows=ROWS, max_rows=ROWS, engine="gpu")
        canary.arm()
        for row in range(ROWS):
            assert canary.admit(f"r{row}") == row
            canary.alloc("full", f"r{row}", engine.pages[row])
        batches = []
        for _ in range(21):
            engine.load(list(range(ROWS)))
            names = ("input_ids", "query_start_loc", "context_lens", "request_rows", "num_requests")
            moving = {name: getattr(engine.batch, name).clone() for name in names}
            item = GroupBatch(slot_mapping=engine.slots.clone(), table=PageTable(entries=engine.table))
            batches.append(replace(engine.batch, **moving, groups=(item,)))
        values = torch.randn_like(engine.values)

        def step(batch: ForwardBatch) -> None:
            item = batch.groups[0]
            assert item is not None
            assert item.slot_mapping is not None
            with canary.step(), canary.forward(batch):
                pages, offsets = item.slot_mapping // PAGE, item.slot_mapping % PAGE
                for layer in range(LAYERS):
                    engine.pool[layer, :, pages, offsets] = values[layer]

        step(batches[0])
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        shared = torch.tensor(engine.pages[0][-1:], device=DEVICE)
        for batch in batches[1:]:
            torch.cuda._sleep(SPIN)
            canary.reuse("full", "r0", shared)
            step(batch)
        done.record()
        waited = done.query()
        torch.cuda.synchronize()
        assert canary.flush(10)
    finally:
        canary.stop(10)
    assert not waited, "the host was held up until the device was done"
    assert [event for event in recorder.events if type(event).__name__ == "ViolationDetected"] == []
    times = [event.gpu_us for event in recorder.events if type(event).__name__ == "SnapshotTaken"]  # type: ignore[attr-defined]
    assert any(time is not None and time > 1 for time in times)


# --- compilations -------------------------------------------------------------------------------------------


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    from triton import knobs

    seen: list[str] = []
    before = knobs.runtime.jit_cache_hook

    def see(*_: Any, **named: Any) -> None:
        seen.append(str(named.get("repr", "")))

    knobs.runtime.jit_cache_hook = see
    yield seen
    knobs.runtime.jit_cache_hook = before


def test_sizes_compile_nothing(compilations: list[str]) -> None:
    from tests.kernels.cases import LIMITS, World
    from tests.kernels.pools import GroupSpec

    world = World(3, (GroupSpec(page_size=16, pages=200),), device=DEVICE, limits=LIMITS, plain=True)
    # Tiles of a size that no other test has compiled.
    state, kernels = world.new_state(), make_kernels(check_tile=64, commit_tile=128)
    kernels.prepare(state)
    assert compilations, "the hook saw not even the kernels that were prepared"
    compilations.clear()
    request, facts = world.admit()
    for size in (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128):
        world.run(world.plan([(request, request.length, size)], facts), (kernels, state), scrub_bytes=size * 300)
        facts = []
    requests = []
    for _ in range(3):
        another, facts = world.admit()
        requests.append(another)
        plan = [(each, each.length, 16) for each in requests]
        world.run(world.plan(plan, facts), (kernels, state), scrub_bytes=1 << 16)
    torch.cuda.synchronize()
    assert compilations == []


# --- large pools --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "pages"),
    [
        pytest.param(torch.uint8, 3 << 16, id="more than 2**31 bytes"),
        pytest.param(torch.bfloat16, 5 << 15, id="more than 2**31 elements"),
    ],
)
def test_the_end_of_a_large_pool_is_addressed_rightly(dtype: torch.dtype, pages: int) -> None:
    """16 tokens of 1,024 values a page: offsets go beyond 32 bits."""
    pool = torch.zeros(pages, PAGE, 8, 128, dtype=dtype, device=DEVICE)
    assert pool.numel() * pool.element_size() > 1 << 31
    assert dtype is torch.uint8 or pool.numel() > 1 << 31
    used = [1, pages // 2, pages - 3, pages - 2, pages - 1]
    for page in used:
        pool[page] = torch.randint(0, 100, pool.shape[1:], device=DEVICE).to(dtype)
    group = AttentionGroup(
        "full", "full", pages * PAGE, PAGE, (KVSource.from_view("k", pool),), trash_pages=(0,),
        offset_follows_position=True,
    )  # fmt: skip
    layout, limits = PoolLayout((group,)), Limits(max_tokens=64, max_batch_rows=2, max_rows=2, poison="full")
    contestants: list[tuple[Kernels, DeviceState]] = []
    for kernels in (ReferenceKernels(), make_kernels()):
        state = DeviceState(layout, make_keys(3), limits)
        state.counters[Word.ARMED] = 1
        contestants.append((kernels, state))
    slots = torch.tensor([page * PAGE + i for page in used for i in (0, 7, 15)], device=DEVICE)
    sums = [kernels.fingerprint(state, 0, "target", slots) for kernels, state in contestants]
    assert torch.equal(*sums)
    assert len(set(sums[0].tolist())) == len(slots)
    for length, new in ((0, 60), (60, 1), (61, 1)):
        batch = _large_batch(used, length, new)
        for kernels, state in contestants:
            if length == 0:
                kernels.facts(state, [
                    DeviceFact(FactOp.ADMIT, row=0, tag=1, seed=5),
                    DeviceFact(FactOp.ALLOC, pages=used, tag=1),
                    DeviceFact(FactOp.POISON, pages=torch.tensor(used, device=DEVICE).tolist()),
                ])  # fmt: skip
            kernels.mark(state, batch, [0], first=True, poison="target")
            kernels.check(state, batch, [0])
        item = batch.groups[0]
        assert item is not None
        assert item.slot_mapping is not None
        kept = item.slot_mapping[1:] if new > 1 else item.slot_mapping
        pool[kept // PAGE, kept % PAGE] = torch.randint(0, 100, (len(kept), 8, 128), device=DEVICE).to(dtype)
        for kernels, state in contestants:
            kernels.seal(state, "target", 1 << 22, last=True, nonfinite=True, poison="full")
    assert_same(contestants[1][1], contestants[0][1], exact=False)
    assert found(contestants[1][1]) == ["WRITE_MISSING"]


def _large_batch(used: list[int], length: int, new: int) -> ForwardBatch:
    positions = range(length, length + new)
    slots = [used[p // PAGE] * PAGE + p % PAGE for p in positions]
    table = PageTable(entries=torch.tensor([used], device=DEVICE))
    return ForwardBatch(
        input_ids=torch.arange(length, length + new, device=DEVICE),
        query_start_loc=torch.tensor([0, new], device=DEVICE),
        context_lens=torch.tensor([length], device=DEVICE),
        request_rows=torch.tensor([0], device=DEVICE),
        groups=(GroupBatch(slot_mapping=torch.tensor(slots, device=DEVICE), table=table),),
    )


# --- facts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [FactOp.ALLOC, FactOp.FREE, FactOp.OWN, FactOp.WIPE, FactOp.QUEUE,
                                FactOp.RESTAMP, FactOp.COPY])  # fmt: skip
def test_pages_in_device_tensors_do_what_pages_in_lists_do(op: FactOp) -> None:
    engine, kernels = Decoder(), make_kernels()
    states = [engine.new_state() for _ in range(2)]
    for state in states:
        kernels.facts(state, engine.admission())
    for _ in range(3):
        engine.load(list(range(8)))
        for state in states:
            engine.forward(kernels, state)
    pages, targets = [engine.pages[row][0] for row in (1, 4)], [engine.pages[row][5] for row in (0, 2)]
    listed = DeviceFact(op, pages=pages, targets=targets if op is FactOp.COPY else (), tag=9)
    moved = replace(
        listed,
        pages=torch.tensor(pages, device=DEVICE),
        targets=torch.tensor(targets, device=DEVICE) if op is FactOp.COPY else (),
    )
    kernels.facts(states[0], [listed])
    kernels.facts(states[1], [moved])
    torch.cuda.synchronize()
    assert_same(states[1], states[0], exact=False)


def test_pages_that_do_not_exist_are_passed_over_on_the_device() -> None:
    engine, kernels = Decoder(), make_kernels()
    state = engine.new_state()
    kernels.facts(state, engine.admission())
    owners = state.groups[0].owner.clone()
    wild = torch.tensor([-1, 128, 1 << 40, -(1 << 62)], device=DEVICE)
    for op in (FactOp.OWN, FactOp.FREE, FactOp.WIPE, FactOp.QUEUE, FactOp.ALLOC):
        kernels.facts(state, [DeviceFact(op, pages=wild, tag=7)])
    torch.cuda.synchronize()
    assert torch.equal(state.groups[0].owner, owners)
