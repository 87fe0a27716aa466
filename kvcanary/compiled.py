"""Entry and exit as operators that may stand inside ``torch.compile(fullgraph=True)``.

Each takes the cache's tensors and says that it changes them. So the compiler keeps it in its place among the writes:
the entry before them, the exit after them. Around compiled code nothing of this is needed: :meth:`Canary.enter` and
:meth:`Canary.leave` are called as always.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.errors import BatchError, ConfigError
from kvcanary.layout import PoolLayout


class GroupForm(NamedTuple):
    """The part of a form that is one group's; without ``columns`` it has no table."""

    fields: tuple[str, ...]
    columns: tuple[str, ...] = ()
    unit: Literal["page", "slot"] = "slot"
    covers_new: bool = False


@dataclass(frozen=True, slots=True)
class BatchForm:
    """What a batch consists of beside its tensors: which fields are given, and the values of the others."""

    fields: tuple[str, ...]
    linked: bool
    groups: tuple[GroupForm | None, ...]


def flatten(batch: ForwardBatch) -> tuple[BatchForm, list[torch.Tensor]]:
    """The form of a batch, and its tensors in the order that the form implies."""
    tensors: list[torch.Tensor] = []
    names = _take(batch, tensors)
    groups: list[GroupForm | None] = []
    for item in batch.groups:
        if item is None:
            groups.append(None)
            continue
        given = _take(item, tensors)
        table = item.table
        if table is None:
            groups.append(GroupForm(given))
        else:
            groups.append(GroupForm(given, _take(table, tensors), table.unit, table.covers_new))
    return BatchForm(names, batch.linked, tuple(groups)), tensors


def _take(part: ForwardBatch | GroupBatch | PageTable, tensors: list[torch.Tensor]) -> tuple[str, ...]:
    names = tuple(f.name for f in fields(part) if isinstance(getattr(part, f.name), torch.Tensor))
    tensors += [getattr(part, name) for name in names]
    return names


def unflatten(form: BatchForm, tensors: Sequence[torch.Tensor]) -> ForwardBatch:
    """The batch of :func:`flatten`.

    Raises:
        BatchError: there are more or fewer tensors than the form has fields.
    """
    wanted = len(form.fields) + sum(len(g.fields) + len(g.columns) for g in form.groups if g is not None)
    if len(tensors) != wanted:
        raise BatchError(f"{len(tensors)} tensors do not fit a batch of {wanted}: {form}")
    rest = iter(tensors)
    given = {name: next(rest) for name in form.fields}
    groups = tuple(None if group is None else _group(group, rest) for group in form.groups)
    return ForwardBatch(**given, groups=groups, linked=form.linked)


def _group(form: GroupForm, rest: Iterator[torch.Tensor]) -> GroupBatch:
    given: dict[str, Any] = {name: next(rest) for name in form.fields}
    if form.columns:
        columns: dict[str, Any] = {name: next(rest) for name in form.columns}
        given["table"] = PageTable(**columns, unit=form.unit, covers_new=form.covers_new)
    return GroupBatch(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What runs inside, and the pool that is attached at the moment (None: none)."""

    enter: Callable[[ForwardBatch], None]
    leave: Callable[[], None]
    layout: Callable[[], PoolLayout | None]


class CompiledForward:
    """Entry and exit of forwards whose batches have one form, for compiled code. :meth:`Canary.compiled` makes it.

    Make it outside of the compiled region and keep it as long as the compiled code::

        inside = canary.compiled(batch)

        @torch.compile(fullgraph=True)
        def forward(tensors, ...):
            inside.enter(tensors)
            ...                                     # the model, with its writes to the cache
            inside.leave()

        with canary.step():
            forward(inside.tensors(batch), ...)

    The tensors may be inputs of the compiled code or made in it.
    """

    def __init__(self, hooks: Hooks, layout: PoolLayout, batch: ForwardBatch) -> None:
        _define()
        tensors = [source.tensor for group in layout.groups for source in group.sources]
        distinct = {(t.data_ptr(), t.dtype, t.shape, t.stride()): t for t in tensors}
        self.caches: list[torch.Tensor] = list(distinct.values())
        self.form, _ = flatten(batch)
        self.number = next(_NUMBERS)
        _BOUND[self.number] = _Bound(hooks, layout, self.caches, self.form)
        weakref.finalize(self, _BOUND.pop, self.number, None)

    def tensors(self, batch: ForwardBatch) -> list[torch.Tensor]:
        """The tensors of a batch, in the order that :meth:`enter` takes them. Not for compiled code.

        Raises:
            BatchError: it has other fields than the batch that this was made for.
        """
        form, tensors = flatten(batch)
        if form != self.form:
            raise BatchError(
                f"a batch of {form} does not fit compiled code made for {self.form}; make another canary.compiled() "
                "for it, and compile again"
            )
        return tensors

    def enter(self, tensors: list[torch.Tensor]) -> None:
        """:meth:`Canary.enter`, before the first write."""
        torch.ops.kvcanary.enter(self.caches, tensors, self.number)

    def leave(self) -> None:
        """:meth:`Canary.leave`, after the last write."""
        torch.ops.kvcanary.leave(self.caches, self.number)


@dataclass(slots=True)
class _Bound:
    hooks: Hooks
    layout: PoolLayout
    caches: list[torch.Tensor]
    form: BatchForm

    def settle(self, given: Sequence[torch.Tensor], *, back: bool) -> None:
        """Bring what was written so far to where the other side reads.

        A compiler that works on copies of the cache writes them back at the end of its region only; one that works
        in place, as inductor does, hands over the very memory, and there is nothing to do.
        """
        for own, copy in zip(self.caches, given, strict=True):
            if own.data_ptr() != copy.data_ptr():
                (copy if back else own).copy_(own if back else copy)


_BOUND: dict[int, _Bound] = {}
"""Operators take numbers, not objects."""
_NUMBERS = itertools.count(1)


def _find(number: int) -> _Bound:
    bound = _BOUND.get(number)
    if bound is None or bound.hooks.layout() is not bound.layout:
        raise ConfigError(
            f"compiled code enters a forward of a canary or pool that is gone (number {number}); keep what "
            "canary.compiled() gave, make another one for a new pool, and compile again"
        )
    return bound


@cache
def _define() -> None:
    """Define the operators; a process does so once, when it first needs them."""
    torch.library.custom_op("kvcanary::enter", _enter, mutates_args=("caches",)).register_fake(_nothing)
    torch.library.custom_op("kvcanary::leave", _leave, mutates_args=("caches",)).register_fake(_nothing)


def _nothing(*_: object) -> None:
    """The operators make no tensor."""


def _enter(caches: list[torch.Tensor], tensors: list[torch.Tensor], number: int) -> None:
    bound = _find(number)
    bound.settle(caches, back=False)
    bound.hooks.enter(unflatten(bound.form, tensors))
    # Poison that the entry placed must be what the writes overwrite.
    bound.settle(caches, back=True)


def _leave(caches: list[torch.Tensor], number: int) -> None:
    bound = _find(number)
    bound.settle(caches, back=False)
    bound.hooks.leave()
