from __future__ import annotations

from collections.abc import Callable

import torch

from kvcanary.digests import digest_tokens
from kvcanary.record import make_keys, prefix_digest
from tests.canary.conftest import Bench
from tests.canary.hand import PAGE, HandEngine

SALTS = [0, 77, 77, 0, 0, 0, 0, 0]


def with_salts(salts: list[int]) -> Callable[[HandEngine], None]:
    """Give the forward's tokens the salts of their positions; one request, from its first token on."""

    def change(engine: HandEngine) -> None:
        values = torch.tensor((salts + [0] * engine.batch.num_tokens)[: engine.batch.num_tokens])
        object.__setattr__(engine.batch, "token_salts", values)

    return change


def write_prefix(bench: Bench) -> list[int]:
    """Two pages with a picture in them; the pages."""
    bench.engine.admit("a", 2 * PAGE)
    bench.canary.admit("a", salts=SALTS)
    bench.engine.step(before=with_salts(SALTS))
    return bench.engine.pages["a"]


def hit(bench: Bench, pages: list[int], salts: list[int]) -> None:
    engine = bench.engine
    tokens = [*engine.tokens["a"][: 2 * PAGE], *engine.new_tokens(3)]
    engine.admit("b", len(tokens), pages=list(pages), tokens=tokens)
    bench.canary.admit("b", tokens=tokens, start=2 * PAGE, salts=[*salts, 0, 0, 0])
    engine.step(["b"])


def test_a_prefix_with_a_picture_is_verified_with_its_salts(bench: Bench) -> None:
    pages = write_prefix(bench)
    hit(bench, pages, SALTS)
    assert bench.violations() == []
    assert bench.of("SnapshotTaken")[-1].verified["row_ends"]["full"] == 1


def test_a_prefix_with_another_picture_is_not_the_requests_own(bench: Bench) -> None:
    pages = write_prefix(bench)
    hit(bench, pages, [0, 78, 78, 0, 0, 0, 0, 0])
    assert {(v.kind, v.request) for v in bench.violations()} == {("REQUEST_DIGEST", "b")}


def test_the_finish_audit_counts_salts(bench: Bench) -> None:
    write_prefix(bench)
    for name, salts in (("a", SALTS), ("c", [1] * 8)):
        if name == "c":
            bench.engine.admit("c", 2 * PAGE)
            bench.canary.admit("c", salts=salts)
            bench.engine.step(["c"], before=with_salts(SALTS))
        bench.canary.finish(name, tokens=bench.engine.tokens[name], length=2 * PAGE)
    bench.engine.tokens.clear()
    bench.engine.admit("d", 3)
    bench.engine.step()
    assert {(v.kind, v.request) for v in bench.violations()} == {("FINAL_DIGEST", "c")}


def test_a_rewind_vouches_for_salted_tokens(bench: Bench) -> None:
    write_prefix(bench)
    engine = bench.engine
    bench.canary.rewind("a", PAGE, tokens=engine.tokens["a"])
    engine.cached["a"] = PAGE
    engine.step()
    assert bench.violations() == []


def test_digests_with_salts_are_the_exact_ones_and_zeros_are_none() -> None:
    keys, tokens = make_keys(5), list(range(100, 180))
    salts = [7 * (n % 3) for n in range(80)]
    assert digest_tokens(keys, 9, tokens, 60, salts) == prefix_digest(keys, 9, tokens[:60], salts)
    assert digest_tokens(keys, 9, tokens, 60, [0] * 80) == digest_tokens(keys, 9, tokens, 60)
