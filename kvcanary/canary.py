"""The canary: what an engine holds, and the hot path around each of its forwards.

Per step the engine's thread makes a handful of launches, records one event and appends to two queues. It
takes no lock, waits for nothing, and allocates nothing on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from kvcanary.batch import ForwardBatch
from kvcanary.binding import Pages
from kvcanary.compiled import CompiledForward, Hooks
from kvcanary.config import CanaryConfig, no_quarantine
from kvcanary.decode import Decoder
from kvcanary.errors import BatchError, ConfigError, words_of
from kvcanary.events import CanaryArmed, Event, QuarantineFailed
from kvcanary.kernels import load_kernels
from kvcanary.layout import DEFAULT_PART, PoolLayout
from kvcanary.mailbox import Quarantine
from kvcanary.observers.base import Observer
from kvcanary.pipeline import DrainReport
from kvcanary.run_info import describe_run
from kvcanary.snapshot import SnapshotRing
from kvcanary.state import Role, Word
from kvcanary.steps import Step
from kvcanary.tools import ROLES, Tools
from kvcanary.transfers import Transfers

Quarantiner = Callable[[Quarantine], Iterable[Event]]
"""An adapter's hand: takes requests and pages out of service, says what it did."""


class Canary(Transfers, Tools):
    """Records, checks and events for one engine's KV cache.

    A canary is unbound until a pool exists: :meth:`bind` gives it the pool's layout and begins a run; a new
    pool means a new run. All methods but :meth:`subscribe`, :meth:`emit`, :meth:`flush`, :attr:`error` and
    :attr:`status` belong to the engine's thread.

    Args:
        config: taken whole; the environment is not read here.
        observers: in addition to what the configuration switches on.
    """

    def __init__(self, config: CanaryConfig, *, observers: Sequence[Observer] = ()) -> None:
        if config.mode == "off":
            raise ConfigError("mode 'off' makes no canary; use install_canary() or watch(), which return none then")
        super().__init__(config, observers)
        self._due = dict.fromkeys(ROLES, 0)
        self._quarantiner: Quarantiner | None = None
        self._step = Step(self, self._begin_step, self._end_step)
        self._cuda = False
        self._scrub_budget = 0
        self._reset_step()

    def _reset_step(self) -> None:
        self._depth = self._entered = self._rows = self._tokens = self._host_ns = 0
        self._replayed = self._counted = False
        self._part = self._poisoned = DEFAULT_PART

    # --- being attached -----------------------------------------------------------------------------------

    def bind(
        self,
        layout: PoolLayout,
        *,
        max_tokens: int,
        max_batch_rows: int,
        max_rows: int,
        engine: str = "",
        engine_version: str = "",
        unarmed: Mapping[str, str] | None = None,
        quarantine: Quarantiner | None = None,
        stream: Any = None,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        """Attach to a pool and begin a run. A canary that was bound before leaves its old pool.

        Args:
            layout: the pool.
            max_tokens: most tokens of one forward, padding included.
            max_batch_rows: most rows of one forward, padding included.
            max_rows: most requests that are live at the same time.
            engine: its name, for the log.
            engine_version: of the engine.
            unarmed: checks whose facts the engine cannot deliver, each with its reason. An engine that writes before
                :meth:`enter` names ``WRITE_MISSING``: no poison is placed then.
            quarantine: what takes requests out of service; without it that mode is refused.
            stream: ``torch.cuda.Stream`` that orders the engine's forwards; None: the current one.
            ranks: ``dp_rank``, ``tp_rank``, ``pp_rank``.

        Raises:
            ConfigError: the mode or the backend cannot work here, or not on such a layout.
        """
        if self.config.mode == "quarantine" and quarantine is None:
            raise no_quarantine(engine or "engine")
        kernels = load_kernels(self.config.backend, layout.device.type)
        if self.bound:
            self.unbind()
        self._poison = "off" if "WRITE_MISSING" in (unarmed or {}) else self.config.poison
        self._take_pool(layout, kernels, max_tokens=max_tokens, max_batch_rows=max_batch_rows, max_rows=max_rows)
        try:
            kernels.prepare(self.state)
        except BaseException:
            self._leave_pool()
            raise
        self._quarantiner = quarantine
        self._stream = stream
        self._cuda = layout.device.type == "cuda"
        self._scrub_budget = self._scrub_bytes
        self._due = dict.fromkeys(ROLES, 0)
        self._full = tuple(i for i, g in enumerate(layout.groups) if g.ring is None)
        self._rings = tuple(i for i, g in enumerate(layout.groups) if g.ring is not None)
        self._all = tuple(range(len(layout.groups)))
        self._parts = frozenset(part for group in layout.groups for part in group.parts)
        self._window_pair = layout.window_pair
        self._reset_step()
        self._ring = SnapshotRing(self.state)
        started = describe_run(
            self, engine=engine, engine_version=engine_version, unarmed=unarmed or {}, ranks=ranks or {}
        )
        self.run = started.run
        self.facts.new_run()
        self.facts.spaces = {g.name: g.arena for g in layout.groups if g.arena is not None}
        self.feed.begin(started, self._ring, Decoder(layout, self.registry.name_of), self.state.keys)
        self.drain.wake()

    def unbind(self) -> None:
        """Leave the pool: launch what is pending, have the last snapshot collected. The drain goes on."""
        if not self.bound:
            return
        try:
            self._launch_facts()
        except Exception as error:  # noqa: BLE001 - a CUDA error is data: what is known on the host is still told
            self.feed.break_off(error)
        self.facts.step(self.next_forward, self._ring.retired)
        self.feed.end(dict(self._due))
        self.drain.flush(self.config.flush_deadline_s)
        self._leave_pool()

    def stop(self, deadline: float | None = None) -> DrainReport:
        """Leave the pool, deliver what is queued within ``deadline`` seconds, stop the drain. Idempotent."""
        self.unbind()
        return super().stop(deadline)

    def arm(self, *, free: Mapping[str | int, Pages] | None = None) -> None:
        """Forget all records and check from now on: after warm-up and graph capture. May wait for the device.

        Args:
            free: by group the pages that nobody holds now, where they are known: a read of one is ``UNWRITTEN`` then.
                Of pages of which nothing was told, nothing is claimed.

        Raises:
            BatchError: no pool is attached, or a page outside of it; nothing has changed then.
        """
        state = self.state
        unheld = {group: self._checked(group, pages) for group, pages in (free or {}).items()}
        self._launch_facts()
        with self._on_stream():
            state.reset()
            state.counters[Word.ARMED] = 1
        self._armed = True
        now, wall = time.monotonic_ns(), time.time_ns()
        self.announce(CanaryArmed(forward=self.next_forward, time_ns=wall, monotonic_ns=now))
        for group, pages in unheld.items():
            self.free(group, pages)

    # --- a forward ----------------------------------------------------------------------------------------

    def step(self) -> AbstractContextManager[Canary]:
        """Around the engine's forward call or graph replay. May hold several forwards.

        Entering applies the facts on the forward's stream and, in ``raise`` mode, raises what was found. What is told
        within it holds from its next :meth:`enter`; a replayed graph has none, so tell before the step then.

        Raises:
            KVCorruptionError: in ``raise`` mode, at every step once corruption was found.
        """
        return self._step

    @contextmanager
    def forward(self, batch: ForwardBatch, *, part: str = DEFAULT_PART) -> Generator[Canary, None, None]:
        """Device half of a forward; may be captured in a graph. See :meth:`enter`."""
        self.enter(batch, part=part)
        try:
            yield self
        except BaseException:
            self.abandon()
            raise
        self.leave()

    def enter(self, batch: ForwardBatch, *, part: str = DEFAULT_PART) -> None:
        """Mark and check, after the engine resolved its inputs and before the model runs.

        Nested calls count once; facts told within the step are applied first. ``part``: the part of the groups' sources
        that this forward writes. What earlier ones sealed of its slots, in any part, is sealed no more: where two
        models write the same slots, use :meth:`turn_to` within one forward.

        Raises:
            BatchError: shapes, dtypes, devices or capacities disagree; nothing was launched.
        """
        if self._depth:
            self._depth += 1
            return
        began = time.perf_counter_ns()
        state = self.state
        if part not in self._parts or not isinstance(batch, ForwardBatch):
            raise BatchError(
                f"a forward takes a ForwardBatch and one of the parts {sorted(self._parts)}, got a "
                f"{type(batch).__name__} and {part!r}"
            )
        batch.validate(self.layout, state.limits.max_tokens, state.limits.max_batch_rows)
        self._depth = 1
        self._part = self._poisoned = part
        # A captured forward runs at its replays, which count it; facts do not belong into the graph.
        self._counted = not self._capturing()
        if self._counted and self._pending:
            self._launch_facts()
            self.facts.stamp(self.next_forward + self._entered, self._ring.retired)
        self._entered += self._counted
        self._rows, self._tokens = batch.num_rows, batch.num_tokens
        self._entry(batch)
        self._host_ns += time.perf_counter_ns() - began

    def leave(self) -> None:
        """Seal what was written, scrub, commit; before the engine signals that the forward is done.

        Raises:
            BatchError: without a matching :meth:`enter`.
        """
        if self._depth == 0:
            raise BatchError("leave() without enter(); each forward needs both, in this order")
        self._depth -= 1
        if self._depth or self._state is None:  # None: it was stopped within the forward
            return
        began = time.perf_counter_ns()
        scrub = 0 if Role.SCRUB in self._suppressed else self._scrub_budget
        if self._counted:
            self._due["scrub"] += self._scrub_budget > 0
        self._seal(scrub, last=True)
        self._host_ns += time.perf_counter_ns() - began

    def turn_to(self, part: str) -> None:
        """Within a forward: seal what is written; what follows writes ``part`` of the same tokens (``""``: nobody's).

        Raises:
            BatchError: no forward is entered, or there is no such part.
        """
        if not self._depth or (part and part not in self._parts):
            raise BatchError(f"turn_to({part!r}) goes between enter() and leave(), to {sorted(self._parts)} or ''")
        if self._part:
            self._seal(0, last=False)
        self._part = part

    def _seal(self, scrub: int, *, last: bool) -> None:
        if self._counted:
            self._due["seal"] += 1
        if Role.SEAL in self._suppressed:
            if last:
                self._kernels.abandon(self.state)
            return
        part = self._part if self.config.fingerprint == "full" else ""
        poison = self._poison if self._part == self._poisoned else "off"
        nonfinite = self.config.check_nonfinite
        self._kernels.seal(self.state, part, scrub, last=last, nonfinite=nonfinite, poison=poison)

    def compiled(self, batch: ForwardBatch, *, part: str = DEFAULT_PART) -> CompiledForward:
        """:meth:`enter` and :meth:`leave` for use inside ``torch.compile(fullgraph=True)``; see the class it returns.

        Args:
            batch: one of the batches to come: they have the same fields, with other tensors.
            part: the part of the groups' sources that these forwards write.

        Raises:
            BatchError: no pool is attached.
        """

        def enter(given: ForwardBatch) -> None:
            self.enter(given, part=part)

        return CompiledForward(Hooks(enter=enter, leave=self.leave, layout=lambda: self._layout), self.layout, batch)

    def abandon(self) -> None:
        """The model raised: its tokens stay unsealed and the rows' histories as they were."""
        if self._depth and self._state is not None:
            self._kernels.abandon(self._state)
        self._depth = 0

    def _entry(self, batch: ForwardBatch) -> None:
        """Mark then check; for rings check then mark, since their layers read the old window before they write."""
        kernels, state = self._kernels, self.state
        if self._counted:
            self._due["mark"] += 1
            self._due["check"] += 1
        marks = Role.MARK not in self._suppressed
        poison = self._part if self._poison != "off" else ""
        if marks and self._full:
            kernels.mark(state, batch, self._full, first=True, poison=poison)
        if Role.CHECK not in self._suppressed:
            kernels.check(state, batch, self._all)
        if marks and self._rings:
            kernels.mark(state, batch, self._rings, first=not self._full, poison=poison)
        every = self.config.swa_divergence_every
        if every and self._window_pair is not None:
            self._due["window"] += self._counted and self.next_forward % every == 0
            if Role.WINDOW not in self._suppressed:
                kernels.window(state, batch, *self._window_pair, every=every)

    def _begin_step(self) -> None:
        began = time.perf_counter_ns()
        if self.mailbox.pending:
            self.check()
        if self._state is None:
            return
        self._reset_step()
        ring = self._ring
        ring.in_step = True
        if self._pending or self._late:
            self._launch_facts()
        self.facts.step(self.next_forward, ring.retired)
        self._host_ns += time.perf_counter_ns() - began

    def _end_step(self, error: type[BaseException] | None) -> None:
        if self._state is None:
            return
        began = time.perf_counter_ns()
        ring = self._ring
        ring.in_step = False
        if self._depth:
            self.abandon()  # what was entered and not left: the model raised, or an adapter lost its leave()
        forwards = self._entered
        if forwards == 0 and error is None and self._replayed:
            # A graph replay runs the captured launches without this thread: what was due is known all the same.
            forwards = 1
            for role in ("mark", "check", "seal"):
                self._due[role] += 1
            self._due["scrub"] += self._scrub_budget > 0
        if forwards == 0:
            self.facts.launched_nothing()
            return
        first = self.next_forward
        self.next_forward = first + forwards
        due = self._due.copy()
        self.facts.launched(first, ring.retired, self._rows, self._tokens, forwards, due)
        self._host_ns += time.perf_counter_ns() - began
        ring.push(first + forwards - 1, time.monotonic_ns(), self._host_ns, due, self._stream)
        self.drain.wake()

    def replayed(self) -> None:
        """Inside a :meth:`step`: the forward is a graph replay, so no hook of this thread runs."""
        self._replayed = True

    def check(self) -> None:
        """Read the mailbox: carry out quarantines, raise what was found in ``raise`` mode.

        Raises:
            KVCorruptionError: corruption was found.
            CanaryStalledError: a kernel or guard stopped working.
        """
        for wanted in self.mailbox.take_quarantines():
            self._carry_out(wanted)
        if self.mailbox.error is not None:
            raise self.mailbox.error.with_traceback(None)  # or it would grow with every step of an engine that goes on

    def _carry_out(self, wanted: Quarantine) -> None:
        try:
            for event in () if self._quarantiner is None else self._quarantiner(wanted):
                self.emit(event)
        except Exception as error:  # noqa: BLE001 - the adapter's and the engine's own: the server goes on
            failed = QuarantineFailed(
                request="",
                error=words_of(error),
                incident=wanted.incident,
                group=wanted.group,
                pages=wanted.pages,
            )
            self.emit(failed)

    # --- small helpers ------------------------------------------------------------------------------------

    def _capturing(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def _launch_facts(self) -> None:
        while self._late:
            self._pending.append(self._late.popleft())
        if not self._pending or self._state is None:
            return
        self._due["facts"] += not self._capturing()
        pending = self._pending[:]
        del self._pending[: len(pending)]  # first: what is refused once must not be refused at every later step
        if Role.FACTS in self._suppressed:
            return
        stream = self._stream
        if stream is None or torch.cuda.current_stream(stream.device) == stream:
            self._kernels.facts(self._state, pending)
            return
        with self._on_stream():
            self._kernels.facts(self._state, pending)
