"""Mark, check and seal as operators that may stand inside ``torch.compile(fullgraph=True)``.

Each takes the cache's tensors and says that it changes them. It changes none, but so the compiler keeps it in its
place among the writes: marks and checks before them, seals after them. Outside of compiled regions the kernels are
called directly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from kvcanary.kernels import Kernels
    from kvcanary.state import DeviceState

NAMESPACE = "kvcanary"


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


class CompiledOps:
    """The operations of one state for compiled code.

    Make it outside of the compiled region, and there :meth:`remember` the form of the batches; inside, call the
    operations with the batch's tensors, which may be inputs of the compiled code or made in it::

        ops = CompiledOps(kernels, state)
        form, tensors = ops.remember(batch)

        @torch.compile(fullgraph=True)
        def forward(tensors):
            ops.mark(form, tensors, [0], first=True)
            ...                                        # writes to the cache
            ops.seal("target", 0, last=True, nonfinite=True)

    Args:
        kernels: what runs; state: on what.
    """

    def __init__(self, kernels: Kernels, state: DeviceState) -> None:
        _define()
        tensors = [source.tensor for group in state.layout.groups for source in group.sources]
        distinct = {(t.data_ptr(), t.dtype, t.shape, t.stride()): t for t in tensors}
        self.caches: list[torch.Tensor] = list(distinct.values())
        self._forms: dict[BatchForm, int] = {}
        self.number = _Registry.add(_Bound(kernels, state, self.caches, []))
        weakref.finalize(self, _Registry.bound.pop, self.number, None)

    def remember(self, batch: ForwardBatch) -> tuple[int, list[torch.Tensor]]:
        """The number of a batch's form, and its tensors. Not for compiled code."""
        form, tensors = flatten(batch)
        number = self._forms.get(form)
        if number is None:
            forms = _Registry.bound[self.number].forms
            number = self._forms[form] = len(forms)
            forms.append(form)
        return number, tensors

    def mark(self, form: int, tensors: list[torch.Tensor], groups: list[int], *, first: bool) -> None:
        """See :meth:`kvcanary.kernels.Kernels.mark`."""
        torch.ops.kvcanary.mark(self.caches, tensors, self.number, form, groups, first)

    def check(self, form: int, tensors: list[torch.Tensor], groups: list[int]) -> None:
        """See :meth:`kvcanary.kernels.Kernels.check`."""
        torch.ops.kvcanary.check(self.caches, tensors, self.number, form, groups)

    def seal(self, part: str, scrub_bytes: int, *, last: bool, nonfinite: bool) -> None:
        """See :meth:`kvcanary.kernels.Kernels.seal`."""
        torch.ops.kvcanary.seal(self.caches, self.number, part, scrub_bytes, last, nonfinite)


@dataclass(slots=True)
class _Bound:
    kernels: Kernels
    state: DeviceState
    caches: list[torch.Tensor]
    forms: list[BatchForm]

    def settle(self, caches: Sequence[torch.Tensor]) -> None:
        """Bring what was written so far to where the kernels read.

        A compiler that works on copies of the cache writes them back at the end of its region only; one that works
        in place, as inductor does, hands over the very memory, and there is nothing to do.
        """
        for own, given in zip(self.caches, caches, strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)


class _Registry:
    """Operators take numbers, not objects."""

    bound: dict[int, _Bound] = {}  # noqa: RUF012
    count = 0

    @classmethod
    def add(cls, bound: _Bound) -> int:
        cls.count += 1
        cls.bound[cls.count] = bound
        return cls.count

    @classmethod
    def find(cls, number: int) -> _Bound:
        try:
            return cls.bound[number]
        except KeyError:
            raise ConfigError(
                f"compiled code calls the operations of a canary that is gone (number {number}); keep its CompiledOps, "
                "and compile again for a new one"
            ) from None


@cache
def _define() -> None:
    """Define the operators; a process does so once, when it first needs them."""
    torch.library.custom_op(f"{NAMESPACE}::mark", _mark, mutates_args=("caches",)).register_fake(_nothing)
    torch.library.custom_op(f"{NAMESPACE}::check", _check, mutates_args=("caches",)).register_fake(_nothing)
    torch.library.custom_op(f"{NAMESPACE}::seal", _seal, mutates_args=("caches",)).register_fake(_nothing)


def _nothing(*_: object) -> None:
    """The operators make no tensor."""


def _mark(
    caches: list[torch.Tensor], tensors: list[torch.Tensor], number: int, form: int, groups: list[int], first: bool
) -> None:
    bound = _Registry.find(number)
    bound.kernels.mark(bound.state, unflatten(bound.forms[form], tensors), groups, first=first)


def _check(caches: list[torch.Tensor], tensors: list[torch.Tensor], number: int, form: int, groups: list[int]) -> None:
    bound = _Registry.find(number)
    bound.kernels.check(bound.state, unflatten(bound.forms[form], tensors), groups)


def _seal(caches: list[torch.Tensor], number: int, part: str, scrub_bytes: int, last: bool, nonfinite: bool) -> None:
    bound = _Registry.find(number)
    bound.settle(caches)
    bound.kernels.seal(bound.state, part, scrub_bytes, last=last, nonfinite=nonfinite)
