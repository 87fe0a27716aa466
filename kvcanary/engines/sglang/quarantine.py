"""Quarantine that heals: what runs is recomputed on an empty cache, with the tokens in flight dropped.

It is SGLang's own way of pausing for new weights (retract, flush, go on), so it holds whatever shares the bad page:
all requests lose their slots and the prefix tree goes with them. Tokens of forwards that found corruption, or were
launched after it, are thrown away before they are processed.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvcanary.engines.sglang.allocator import Method
from kvcanary.errors import ConfigError
from kvcanary.events import Event, QuarantineFailed, RequestQuarantined
from kvcanary.mailbox import Quarantine
from kvcanary.state import Word

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches
    from kvcanary.engines.sglang.requests import Requests

_MOST = 3
"""Times that a request is recomputed; one that is hurt again is aborted."""


class Healer:
    """The canary's hand in one scheduler."""

    def __init__(self, scheduler: Any, canary: Canary, requests: Requests) -> None:
        self._scheduler = scheduler
        self._canary = canary
        self._requests = requests
        self._wanted: list[Quarantine] = []
        self._times: Counter[str] = Counter()
        self._seen = 0

    def __call__(self, wanted: Quarantine) -> Iterable[Event]:
        """Note what is asked for; it is done where SGLang's loop begins its next turn."""
        self._wanted.append(wanted)
        return ()

    def wire(self, patches: Patches) -> None:
        """Stand before results are processed and where a turn begins."""
        patches.wrap(self._scheduler, "process_batch_result", self._processed)
        patches.wrap(self._scheduler, "ingest_requests", self._turned)

    def _processed(self, original: Method) -> Method:
        def process_batch_result(batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            self._look(result)
            if self._wanted:
                for request in self._requests.live():
                    request.is_retracted = True  # SGLang drops what such a request has in flight
            return original(batch, result, *args, **kwargs)

        return process_batch_result

    def _look(self, result: Any) -> None:
        """Learn what this forward found before its tokens leave. Waits where SGLang is about to wait anyway."""
        done = getattr(result, "copy_done", None)
        if done is not None:
            done.synchronize()
        stored = int(self._canary.state.headers[:, Word.STORED].max())
        if stored > self._seen:
            self._seen = stored
            self._canary.flush()
            self._canary.check()

    def _turned(self, original: Method) -> Method:
        def ingest_requests(*args: Any, **kwargs: Any) -> Any:
            taken = original(*args, **kwargs)
            if self._wanted:
                self._heal()
            return taken

        return ingest_requests

    def _heal(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        asked = dict.fromkeys(name for wanted in self._wanted for name in wanted.requests)
        live = {request.rid: request for request in self._requests.live()}
        scheduler, canary = self._scheduler, self._canary
        # Broken tables are given back as they are; the flush arms again.
        canary.disarm("a quarantine empties the pool")
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        try:
            flushed = bool(scheduler.flush_cache(empty_cache=False))
        finally:
            scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        if not canary.armed:
            self._requests.forget()
            canary.arm()
        self._wanted.clear()
        for name in asked:
            for event in self._outcome(name, live.get(name), flushed=flushed):
                canary.emit(event)

    def _outcome(self, name: str, request: Any, *, flushed: bool) -> Iterable[Event]:
        if request is None:
            yield QuarantineFailed(request=name, error="the request ended before it could be taken out")
            return
        self._times[name] += 1
        left = len(request.output_ids)
        if flushed and self._times[name] <= _MOST:
            yield RequestQuarantined(request=name, action="healed", tokens_left=left)
            return
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        why = "its cache is corrupt again and again" if flushed else "the corrupt cache could not be flushed"
        request.to_finish = FINISH_ABORT(f"kvcanary aborted this request: {why}")
        yield RequestQuarantined(request=name, action="aborted", tokens_left=left)


def check_quarantine(tp_size: int, dp_size: int) -> None:
    """Refuse the mode where ranks would part.

    Raises:
        ConfigError: schedulers of several ranks keep step with one another.
    """
    if tp_size > 1 or dp_size > 1:
        raise ConfigError(
            f"mode 'quarantine': this server has tp_size={tp_size} and dp_size={dp_size}; schedulers of several ranks "
            "must retract the same requests in the same turn, and a finding is known to one rank only. Use 'log' or "
            "'raise'"
        )
