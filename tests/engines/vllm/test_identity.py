"""What vLLM separates equal tokens by, from its own requests to the canary's findings."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.vllm.layout import CoveredGroup, Pool
from kvcanary.engines.vllm.media import is_salted, salts_between, salts_of_batch, salts_of_prompt, spans_of
from kvcanary.engines.vllm.replay import Replay
from kvcanary.engines.vllm.rows import Rows
from kvcanary.engines.vllm.scheduler import SchedulerWatch
from kvcanary.engines.vllm.wire import ATTRIBUTE, pack, starts_of, take
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout
from kvcanary.testing import EventRecorder, assert_no_violations, assert_violation

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

PAGE, PROMPT = 4, 8
PROMPT_IDS = list(range(10, 10 + PROMPT))
IMAGE = (2, 4)
"""offset and length of the placeholders in a prompt"""


def request(name: str, *, image: str = "", **options: Any) -> Any:
    """A request of vLLM's own; ``image``: the identifier of the one that it holds."""
    place = PlaceholderRange(offset=IMAGE[0], length=IMAGE[1])
    features = [MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)]
    return Request(
        request_id=name,
        prompt_token_ids=PROMPT_IDS,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        mm_features=features if image else None,
        **options,
    )


def scheduled(watch: Any, new: Sequence[Any], running: dict[str, int] | None = None) -> Any:
    """vLLM's message of a step with what the scheduler's half says beside it. ``running``: computed tokens."""
    running = running or {}
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens = list(running), list(running.values())
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(one, ([1],)) for one in new]
    output.scheduled_cached_reqs = cached
    counts = {one.request_id: PROMPT - one.num_computed_tokens for one in new}
    output.num_scheduled_tokens = counts | dict.fromkeys(running, 1)
    starts = starts_of(output)
    setattr(output, ATTRIBUTE, pack([*watch._admitted(output, starts), *watch._known(output, starts)]))
    return output


def scheduler_of(*requests: Any, drafts: int = 0, asynchronous: bool = False) -> Any:
    return SimpleNamespace(
        requests={one.request_id: one for one in requests},
        is_encoder_decoder=False,
        num_spec_tokens=drafts,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )


class Served:
    """Two requests with the same tokens: both prefill, then both decode through a table of the test's own."""

    def __init__(self, *requests: Any) -> None:
        self.events = EventRecorder()
        self.canary = Canary(CanaryConfig(mode="log", scrub_mib_per_step=0), observers=[self.events]).start()
        source = KVSource.from_view("layer", torch.randn(8, PAGE, 3), layer=0)
        layout = PoolLayout((AttentionGroup("full.0", "full", 8 * PAGE, PAGE, (source,)),))
        self.canary.bind(layout, max_tokens=32, max_batch_rows=2, max_rows=2)
        self.canary.arm()
        self.rows = Rows(2, 32, torch.device("cpu"))
        self.replay = Replay(self.canary, Pool(layout, (CoveredGroup(0, "full.0", 1),), frozenset(), False), 2)
        self.requests = requests
        self.watch = SchedulerWatch(scheduler_of(*requests), "0.33.0")

    def step(self, output: Any, ids: list[list[int]], tables: list[list[int]]) -> None:
        """One forward of what ``output`` schedules."""
        told, names = take(output), list(output.num_scheduled_tokens)
        starts = [starts_of(output)[name] for name in names]
        assert told is not None
        self.replay.apply(told, output)
        counts = torch.tensor([len(one) for one in ids])
        slots = [
            table[p // PAGE] * PAGE + p % PAGE
            for table, start, one in zip(tables, starts, ids, strict=True)
            for p in range(start, start + len(one))
        ]
        with self.canary.step():
            self.canary.enter(
                self.rows.batch(
                    self.replay.known(names),
                    input_ids=torch.tensor([token for one in ids for token in one]),
                    positions=torch.tensor(
                        [s + i for s, one in zip(starts, ids, strict=True) for i in range(len(one))]
                    ),
                    query_start_loc=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32),
                    seq_lens=torch.tensor(starts, dtype=torch.int32) + counts.to(torch.int32),
                    slot_mappings=[torch.tensor(slots)],
                    tables=[torch.tensor(tables, dtype=torch.int32)],
                )
            )
            self.canary.leave()

    def decode(self, *, wrong_table: bool) -> EventRecorder:
        """Both requests; with ``wrong_table`` the second one decodes over the first one's first page."""
        right = [[1, 2, 3], [4, 5, 6]]
        self.step(scheduled(self.watch, self.requests), [PROMPT_IDS, PROMPT_IDS], right)
        for one in self.requests:
            one.append_output_token_ids(77)
        running = {one.request_id: PROMPT for one in self.requests}
        tables = [right[0], [1, *right[1][1:]]] if wrong_table else right
        self.step(scheduled(self.watch, [], running), [[77], [77]], tables)
        self.canary.stop()
        return self.events

    def hit(self) -> EventRecorder:
        """The first request, and then the second one, which has the first one's first page in common with it."""
        first, second = self.requests
        self.step(scheduled(self.watch, [first]), [PROMPT_IDS], [[1, 2, 3]])
        second.num_computed_tokens = PAGE
        self.step(scheduled(self.watch, [second]), [PROMPT_IDS[PAGE:]], [[1, 5, 6]])
        self.canary.stop()
        return self.events


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"image": "cat"}, {"image": "dog"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"lora_request": LoRARequest("adapter", 1, "/one")}, {"lora_request": LoRARequest("adapter", 2, "/two")}),
        ({"lora_request": LoRARequest("adapter", 1, "/one")}, {}),
    ],
    ids=["images", "cache salts", "adapters of one name", "an adapter and none"],
)
def test_a_page_of_the_same_tokens_with_other_content_is_found(first: Any, second: Any) -> None:
    assert_violation(
        Served(request("a", **first), request("b", **second)).decode(wrong_table=True), kind="DIGEST", request="b"
    )


@pytest.mark.parametrize(
    "what",
    [{"image": "cat"}, {"cache_salt": "a"}, {"lora_request": LoRARequest("adapter", 1, "/one")}, {}],
    ids=["image", "cache salt", "adapter", "nothing"],
)
def test_a_page_of_the_same_tokens_with_the_same_content_is_fine(what: Any) -> None:
    events = Served(request("a", **what), request("b", **what)).decode(wrong_table=True)
    assert_no_violations(events, checks=["links", "row_ends"])


@pytest.mark.parametrize("images", [("cat", "cat"), ("", "")])
def test_a_prefix_with_the_same_image_is_a_prefix_in_common(images: tuple[str, str]) -> None:
    events = Served(request("a", image=images[0]), request("b", image=images[1])).hit()
    assert_no_violations(events, checks=["links", "row_ends"])


def test_a_prefix_that_ends_in_another_image_is_none() -> None:
    events = Served(request("a", image="cat"), request("b", image="dog")).hit()
    assert_violation(events, kind="REQUEST_DIGEST", request="b")


def test_placeholders_carry_a_salt_of_their_image_and_nothing_else_does() -> None:
    (span,) = spans = spans_of(request("a", image="cat"))
    assert span[:2] == (2, 6)
    assert salts_of_prompt(spans) == [0, 0, *[span[2]] * 4]
    assert salts_between(spans, 4, 8) == [span[2], span[2], 0, 0]
    assert [is_salted(spans, position) for position in (1, 2, 5, 6)] == [False, True, True, False]
    assert spans_of(request("b", image="dog"))[0][2] != span[2]
    assert spans_of(request("c")) == ()


def test_a_batch_past_all_images_needs_no_salts() -> None:
    spans = spans_of(request("a", image="cat"))
    assert salts_of_batch([(spans, 6, 2), ((), 0, 3)]) is None
    assert salts_of_batch([(spans, 5, 2), ((), 0, 1)]) == [spans[0][2], 0, 0]


def test_an_encoders_input_is_no_part_of_a_decoders_prompt() -> None:
    one = request("a", image="speech")
    scheduler = scheduler_of(one)
    scheduler.is_encoder_decoder = True
    assert SchedulerWatch(scheduler, "0.33.0")._media(one) == ()


def last_ids(one: Any, start: int, **options: Any) -> list[int] | None:
    """What the scheduler's half says of the id before ``start``; None: nothing of any request."""
    watch = SchedulerWatch(scheduler_of(one, **options), "0.33.0")
    (known,) = watch._known(scheduled(watch, [], {one.request_id: start}), {one.request_id: start}) or (None,)
    return None if known is None else list(memoryview(known.ids).cast("i"))  # type: ignore[union-attr]


def test_the_scheduler_says_which_id_came_before() -> None:
    assert last_ids(request("a"), 0) == [-1]
    assert last_ids(request("a"), 3) == [12]


def test_of_a_token_that_is_still_in_flight_the_scheduler_has_no_opinion() -> None:
    assert last_ids(request("a"), PROMPT + 1, asynchronous=True) == [-1]


def test_of_a_placeholder_the_scheduler_has_no_opinion() -> None:
    assert last_ids(request("a", image="cat"), 3) == [-1]


def test_where_the_scheduler_counts_on_drafts_it_says_nothing() -> None:
    assert last_ids(request("a"), 3, drafts=3, asynchronous=True) is None
    assert last_ids(request("a"), 3, drafts=3) == [12]
