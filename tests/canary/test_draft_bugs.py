"""Three public faults of draft models (SGLang #25015, #26329, #28254), replayed; each has a clean twin.

A draft model of the EAGLE kind reads the text one token ahead: at position p it is fed token p + 1. What no text
knows yet, the target's guess fills in. The draft has a pool and a token stream of its own, and so its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.canary.conftest import Bench
from tests.canary.hand import HandEngine

pytestmark = pytest.mark.parametrize("faulty", [False, True])
GUESS = 1234
"""What the target predicts; no text of these tests holds it."""


class Draft:
    """The draft's side of one request."""

    def __init__(self, bench: Bench, text: list[int]) -> None:
        self.bench = bench
        self.engine: HandEngine = bench.engine
        self.text = text
        self.started = False

    def prefill(self, end: int, *, tail: int) -> None:
        """Up to position ``end``, read one token ahead; ``tail`` is fed at the last one."""
        fed = [*self.text[1:end], tail]
        if not self.started:
            self.engine.admit("draft", 0, tokens=fed)
            self.started = True
        start = self.engine.cached["draft"]
        self.engine.tokens["draft"][start:] = fed[start:]
        known = [*self.text[start + 1 : end + 1]]
        self._step(expected=known + [-1] * (end - start - len(known)))

    def decode(self, *, shift: int = 0) -> None:
        """One draft step after another, each at the next position."""
        length = self.engine.cached["draft"]
        self._step(positions=[length + shift])

    def retract(self, text: list[int]) -> None:
        """Retracted and resumed: prompt and output are the text now."""
        self.bench.canary.preempt("draft")
        pages = self.engine.pages.pop("draft")
        self.bench.canary.free("full", pages, "draft")
        self.engine.free_pages += pages
        self.text, self.started = text, False

    def finish(self) -> None:
        self.engine.finish("draft")

    def _step(self, *, expected: list[int] | None = None, positions: list[int] | None = None) -> None:
        def given(engine: HandEngine) -> None:
            ids = None if expected is None else torch.tensor(expected)
            at = None if positions is None else torch.tensor(positions)
            engine.batch = replace(engine.batch, expected_ids=ids, positions=at)

        self.engine.step(before=given)


@pytest.fixture
def draft(bench: Bench) -> Callable[[int], Draft]:
    return lambda length: Draft(bench, list(range(100, 100 + length)))


def test_a_position_that_is_raised_before_the_draft_step(
    bench: Bench, draft: Callable[[int], Draft], faulty: bool
) -> None:
    request = draft(8)
    request.prefill(8, tail=GUESS)
    for _ in range(2):
        request.decode(shift=int(faulty))
    request.finish()
    found = [(v.kind, v.request, v.position_expected, v.position_found) for v in bench.violations()]
    assert found == ([("INPUT_POSITION", "draft", 8, 9)] if faulty else [])


def test_a_prompt_token_that_is_lost_at_the_border_of_a_chunk(
    bench: Bench, draft: Callable[[int], Draft], faulty: bool
) -> None:
    request = draft(10)
    request.prefill(5, tail=GUESS if faulty else request.text[5])
    request.prefill(10, tail=GUESS)
    request.decode()
    request.finish()
    found = [(v.kind, v.request, v.position_expected, v.token_found) for v in bench.violations()]
    assert found == ([("INPUT_TOKEN", "draft", 4, GUESS)] if faulty else [])


def test_an_output_token_that_is_lost_when_a_retracted_request_resumes(
    bench: Bench, draft: Callable[[int], Draft], faulty: bool
) -> None:
    prompt, output, chunk = 40, 100, 64
    request = draft(prompt)
    request.prefill(prompt, tail=GUESS)
    request.decode()
    request.retract(list(range(100, 100 + prompt + output)))
    # The border lies in the output, and the faulty look-up knows the prompt alone.
    request.prefill(chunk, tail=GUESS if faulty else request.text[chunk])
    request.prefill(2 * chunk, tail=request.text[2 * chunk])
    request.prefill(prompt + output, tail=GUESS)
    request.finish()
    found = [(v.kind, v.request, v.position_expected, v.token_found) for v in bench.violations()]
    assert found == ([("INPUT_TOKEN", "draft", chunk - 1, GUESS)] if faulty else [])
