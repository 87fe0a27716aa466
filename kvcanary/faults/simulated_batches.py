"""Faults in what a forward is given or does: tables, mappings, ids, positions, bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcanary.engines.simulated.batch import Batch, Row
from kvcanary.engines.simulated.style import Style
from kvcanary.faults.simulated_ops import Injector, Operation, before_forward, operation

Hit = tuple[tuple[str, ...], str, Callable[[], object]]


def _group(injector: Injector, batch: Batch) -> str:
    return injector.rng.choice(list(batch.tables))


def _old(batch: Batch, least: int = 1) -> list[int]:
    """Rows with that many old tokens."""
    return [number for number, row in enumerate(batch.rows) if row.context >= least]


def _entries(injector: Injector, row: Row, group: str) -> range:
    """Columns of a row's table that attention reads for old tokens."""
    style = injector.engine.style
    size = 1 if style.slot_tables else style.page_size
    if group == "window" and style.ring is not None:
        return range(min(-(-row.context // size), style.ring // size))
    low = max(0, row.context - style.window + 1) if group == "window" else 0
    return range(low // size, -(-row.context // size))


def _two(injector: Injector, batch: Batch) -> tuple[int, int] | None:
    rows = _old(batch)
    if len(rows) < 2:
        return None
    one, two = injector.rng.sample(rows, 2)
    return one, two


def _swapped_pages(injector: Injector, batch: Batch) -> Hit | None:
    pair, group = _two(injector, batch), _group(injector, batch)
    if pair is None:
        return None
    one, two = (batch.rows[number] for number in pair)
    columns = [c for c in _entries(injector, one, group) if c in _entries(injector, two, group)]
    if not columns:
        return None
    column, table, rows = injector.rng.choice(columns), batch.tables[group], list(pair)

    def work() -> None:
        table[rows, column] = table[rows[::-1], column]

    return (one.request.name, two.request.name), group, work


def _shifted_table(injector: Injector, batch: Batch) -> Hit | None:
    rows, group = _old(batch, 2 * injector.engine.style.page_size), _group(injector, batch)
    if not rows:
        return None
    row, table = injector.rng.choice(rows), batch.tables[group]

    def work() -> None:
        table[row, :-1] = table[row, 1:].clone()

    return (batch.rows[row].request.name,), group, work


def _foreign_table(injector: Injector, batch: Batch) -> Hit | None:
    pair, group = _two(injector, batch), _group(injector, batch)
    if pair is None:
        return None
    (one, two), table = pair, batch.tables[group]
    name = batch.rows[one].request.name

    def work() -> None:
        table[one] = table[two].clone()

    return (name,), group, work


def _late_table(injector: Injector) -> None:
    """The forward before this one still waits, and its tables are overwritten."""
    engine, waiting = injector.engine, list[tuple[Batch, int]]()

    def make(original: Callable[[Batch], None]) -> Callable[[Batch], None]:
        def forward(batch: Batch) -> None:
            if waiting and waiting[-1][1] > engine.device.done and injector.injection is None:
                old = waiting[-1][0]
                for group, table in old.tables.items():
                    new = batch.tables[group]
                    rows, columns = (min(a, b) for a, b in zip(table.shape, new.shape, strict=True))
                    table[:rows, :columns] = new[:rows, :columns]
                injector.done(*(row.request.name for row in old.rows), forward=old.forward)
            original(batch)
            waiting[:] = [(batch, engine.device.launched)]

        return forward

    injector.patches.wrap(engine, "forward", make)


def _wild_entry(injector: Injector, batch: Batch) -> Hit | None:
    rows, group = _old(batch), _group(injector, batch)
    if not rows:
        return None
    row, table = injector.rng.choice(rows), batch.tables[group]
    column = injector.rng.choice(_entries(injector, batch.rows[row], group))

    def work() -> None:
        table[row, column] = 1 << 24

    return (batch.rows[row].request.name,), group, work


def _mapping(choose: Callable[[Injector, Batch, Row, str], int | None]) -> Callable[[Injector, Batch], Hit | None]:
    """The last new token of a row goes to another slot."""

    def change(injector: Injector, batch: Batch) -> Hit | None:
        if not batch.rows:
            return None
        row, group = injector.rng.choice(batch.rows), injector.rng.choice(list(batch.mapping))
        slot = choose(injector, batch, row, group)
        if slot is None:
            return None
        place, mapping = row.first + len(row.ids) - 1, batch.mapping[group]

        def work() -> None:
            mapping[place] = slot

        return (row.request.name, *_owners(injector, group, slot)), group, work

    return change


def _owners(injector: Injector, group: str, slot: int) -> list[str]:
    page = slot // injector.engine.style.page_size
    return [request.name for request in injector.engine.running if page and page in request.pages.get(group, ())]


def _stale_slot(injector: Injector, _: Batch, row: Row, group: str) -> int | None:
    size, ring = injector.engine.style.page_size, injector.engine.style.ring
    if row.context < 1:
        return None
    place = row.context - 1 if group == "full" or ring is None else (row.context - 1) % ring
    page = row.request.pages[group][place // size]
    return page * size + place % size if page else None


def _foreign_slot(injector: Injector, _: Batch, row: Row, group: str) -> int | None:
    others = [r for r in injector.engine.running if r is not row.request and any(r.pages[group])]
    if not others:
        return None
    size = injector.engine.style.page_size
    page = injector.rng.choice([page for page in injector.rng.choice(others).pages[group] if page])
    return page * size + (row.end - 1) % size


def _trash(injector: Injector, _: Batch, row: Row, __: str) -> int | None:
    return (row.end - 1) % injector.engine.style.page_size


def _same_slot(injector: Injector, batch: Batch, row: Row, group: str) -> int | None:
    others = [other for other in batch.rows if other is not row]
    if not others:
        return None
    slot = batch.wanted[group][batch.rows.index(injector.rng.choice(others))][-1]
    return slot if slot >= 0 else None


def _padding_write(injector: Injector, batch: Batch) -> Hit | None:
    """A dead row keeps the slot of somebody: of a finished request, or the last of the pool."""
    engine = injector.engine
    victims = [r for r in engine.running if r.computed > 1 and not r.pending and all(r.pages["full"])]
    if not batch.padding or not victims:
        return None
    victim = injector.rng.choice(victims)
    place, size = injector.rng.randrange(victim.computed), engine.style.page_size
    slot, mapping = victim.pages["full"][place // size] * size + place % size, batch.mapping["full"]
    if any(slot in slots for slots in batch.wanted["full"]):
        return None  # what it hits in its own forward is sealed as it is found: nobody can tell then

    def work() -> None:
        mapping[-1] = slot

    return (victim.name,), "full", work


def _ids(
    change: Callable[[Injector, torch.Tensor, Row], Callable[[], object]],
) -> Callable[[Injector, Batch], Hit | None]:
    def choose(injector: Injector, batch: Batch) -> Hit | None:
        if not batch.rows:
            return None
        row = injector.rng.choice(batch.rows)
        return (row.request.name,), "", change(injector, batch.input_ids, row)

    return choose


def _wrong_token(injector: Injector, ids: torch.Tensor, row: Row) -> Callable[[], object]:
    place = row.first + injector.rng.randrange(len(row.ids) - row.drafts)
    return lambda: ids[place].add_(1)


def _placeholder(_: Injector, ids: torch.Tensor, row: Row) -> Callable[[], object]:
    place = row.first + len(row.ids) - 1
    return lambda: ids[place].fill_(-1)


def _swapped_tokens(injector: Injector, batch: Batch) -> Hit | None:
    rows = [row for row in batch.rows if row.samples and row.context and not row.drafts]
    if len(rows) < 2:
        return None
    pair = injector.rng.sample(rows, 2)
    ids, places = batch.input_ids, [row.first + len(row.ids) - 1 for row in pair]

    def work() -> None:
        ids[places] = ids[places[::-1]]

    return tuple(row.request.name for row in pair), "", work


def _wrong_position(injector: Injector, batch: Batch) -> Hit | None:
    if not batch.rows:
        return None
    row, positions = injector.rng.choice(batch.rows), batch.positions

    def work() -> None:
        positions[row.first : row.first + len(row.ids)] += 1

    return (row.request.name,), "", work


def _bytes(component: str) -> Callable[[Injector, Batch], Hit | None]:
    """One bit of an old token of a running request."""

    def change(injector: Injector, batch: Batch) -> Hit | None:
        rows, group = _old(batch), injector.rng.choice(injector.engine.style.groups)
        if not rows:
            return None
        row = batch.rows[injector.rng.choice(rows)]
        style = injector.engine.style
        low = max(0, row.context - style.window + 1) if group == "window" else 0
        if low == row.context:  # a window of one token has no old ones
            return None
        place = injector.rng.randrange(low, row.context)
        place = place % style.ring if group == "window" and style.ring else place
        page = row.request.pages[group][place // style.page_size]
        buffer = getattr(injector.engine.memory[group], component)
        words = buffer[injector.rng.randrange(len(buffer)), page, place % style.page_size].view(torch.int32)
        bit = 1 << injector.rng.randrange(20)
        return (row.request.name,), group, lambda: words[:1].bitwise_xor_(bit)

    return change


def _not_a_number(injector: Injector) -> None:
    engine = injector.engine
    memory = engine.memory["full"]

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def write(slots: torch.Tensor, values: torch.Tensor, model: str) -> None:
            original(slots, values, model)
            slot, size = int(slots[0]), engine.style.page_size
            if injector.injection is None and slot >= size:
                memory.scale[memory.layers[model].stop - 1, slot // size, slot % size] = torch.nan
                injector.done(group="full", forward=engine.oracle.executing)

        return write

    injector.patches.wrap(memory, "write", make)


def _translation(value: int) -> Callable[[Injector, Batch], Hit | None]:
    """An entry of the table from full slots to window slots is lost, or is an old one."""

    def change(injector: Injector, batch: Batch) -> Hit | None:
        rows, style = _old(batch), injector.engine.style
        if not rows:
            return None
        row, table = batch.rows[injector.rng.choice(rows)], injector.engine.model.translation
        low = max(0, row.context - style.window + 1)
        if low == row.context:
            return None
        place = injector.rng.randrange(low, row.context)
        slot = row.request.pages["full"][place // style.page_size] * style.page_size + place % style.page_size

        def work() -> None:
            table[slot] = (int(table[slot]) + style.page_size) % len(table) if value else 0

        return (row.request.name,), "window", work

    return change


def _padded(style: Style) -> bool:
    return style.padding > 0


def _overlapped(style: Style) -> bool:
    return style.depth > 0


def _translated(style: Style) -> bool:
    return style.sliding == "translated"


def _no_drafts(style: Style) -> bool:
    return not style.drafts


def _op(
    name: str, description: str, change: Callable[[Injector, Batch], Hit | None], expects: str, **rest: Any
) -> Operation:
    return operation(name, description, expects, before_forward(change), **rest)


_READS = "DIGEST REQUEST_DIGEST POSITION UNWRITTEN WINDOW TABLE_MISMATCH"

BATCH_FAULTS: tuple[Operation, ...] = (
    _op("swapped-pages", "Two rows swap one entry of their tables.", _swapped_pages, _READS),
    _op("shifted-table", "A row's table is read one entry late.", _shifted_table, _READS),
    _op("foreign-table", "A row reads through another row's whole table.", _foreign_table, _READS),
    operation(
        "late-table",
        "A forward that waits gets the tables of the next one: one pinned buffer for both.",
        _READS + " SLOT_RANGE",
        _late_table,
        fits=_overlapped,
        case="NVIDIA/TensorRT-LLM#15546",
    ),
    _op("wild-entry", "An entry of a table lies far outside the pool.", _wild_entry, "SLOT_RANGE"),
    _op("stale-slot", "A token is written where the one before it was.", _mapping(_stale_slot), "TABLE_MISMATCH"),
    _op(
        "foreign-write",
        "A token is written into another request's page.",
        _mapping(_foreign_slot),
        "WRITE_FOREIGN TABLE_MISMATCH",
    ),
    _op(
        "lost-write",
        "A token goes to the trash page.",
        _mapping(_trash),
        "TABLE_MISMATCH WRITE_FOREIGN UNWRITTEN",
        within=None,
    ),
    _op("same-slot", "Two tokens go to one slot.", _mapping(_same_slot), "WRITE_CONFLICT TABLE_MISMATCH WRITE_FOREIGN"),
    _op(
        "padding-write",
        "A padded row writes into the slot of a request.",
        _padding_write,
        "CONTENT",
        within=2,
        fits=_padded,
        case="vllm-project/vllm#43810, vllm-project/vllm-ascend#15417",
    ),
    _op(
        "wrong-token",
        "The model gets another token than the one that was sampled.",
        _ids(_wrong_token),
        "INPUT_TOKEN REQUEST_DIGEST FINAL_DIGEST",
        within=16,
    ),
    _op("placeholder", "A negative id reaches the model.", _ids(_placeholder), "INPUT_PLACEHOLDER"),
    _op(
        "swapped-tokens",
        "Two rows get each other's sampled token.",
        _swapped_tokens,
        "INPUT_TOKEN REQUEST_DIGEST FINAL_DIGEST",
        within=16,
        fits=_no_drafts,
    ),
    _op(
        "wrong-position",
        "A row's positions are one too high.",
        _wrong_position,
        "INPUT_POSITION",
        case="sgl-project/sglang#25015",
    ),
    _op(
        "flipped-bit",
        "A bit of the keys and values flips.",
        _bytes("kv"),
        "CONTENT",
        within=2,
        case="SemiAnalysisAI/InferenceX#1944",
    ),
    _op("flipped-scale", "A bit of a scale flips.", _bytes("scale"), "CONTENT", within=2),
    operation(
        "not-a-number",
        "The model writes a value that is none.",
        "NONFINITE",
        _not_a_number,
        named=False,
        case="vllm-project/vllm#18777",
    ),
    _op("lost-translation", "A window slot is not mapped any more.", _translation(0), "WINDOW", fits=_translated),
    _op(
        "stale-translation", "A window slot is another one.", _translation(1), _READS + " SLOT_RANGE", fits=_translated
    ),
)
