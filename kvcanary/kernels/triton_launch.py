"""Launching Triton kernels with little host time: compiled once, then called through the compiled handle."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def entry(function: Callable[..., None]) -> Any:
    """``triton.jit`` for a kernel whose run-time arguments are all int64 and never specialised.

    Otherwise the values 1 and multiples of 16 each compile a kernel of their own, in the middle of serving.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    return triton.jit(do_not_specialize=runtime)(function)


class Kernel:
    """A kernel with its compile-time constants bound.

    All run-time arguments are int64, so that one compiled kernel fits every call, and the binder that would look at
    them can be passed by. Triton's interpreter compiles nothing; there every call is a plain one.

    Args:
        function: what ``triton.jit`` made.
        warps: warps of one program.
        registers: most registers of a thread, 0: as the compiler likes. Judging and reporting take many, and the
            compiler would give them to the clean path too, which then runs with half the threads.
        constants: values of the ``constexpr`` parameters, which come last in the signature.
    """

    __slots__ = ("_constants", "_function", "_handle", "_options", "_values")

    def __init__(self, function: Any, warps: int, registers: int = 0, **constants: object) -> None:
        names = [name for name in function.arg_names if name in constants]
        self._function = function
        self._constants = constants
        self._values = tuple(constants[name] for name in names)
        # Without a floating operation in any kernel, fusion is settled; Triton warns where it is not named.
        self._options: dict[str, int] = {"num_warps": warps, "enable_fp_fusion": False}
        if registers:
            self._options["maxnreg"] = registers
        self._handle: Any = None

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self._function.__name__)

    def source(self) -> tuple[Any, dict[str, object], dict[str, int]]:
        """The function, its compile-time constants, and the compiler's options."""
        return self._function, self._constants, self._options

    def compile(self) -> None:
        """Compile for the current device, and load the result. The interpreter has nothing to do."""
        if self._handle is None:
            count = len(self._function.arg_names) - len(self._values)
            handle = self._function.warmup(*[0] * count, grid=(1, 1, 1), **self._constants, **self._options)
            if handle is not None:
                # Indexing loads the code, which must not happen while a stream is captured.
                handle[1, 1, 1]
                self._handle = handle

    def __call__(self, grid: tuple[int, int, int], *arguments: int) -> None:
        """Launch on the current stream."""
        if self._handle is None:
            self.compile()
        if self._handle is None:
            self._function[grid](*arguments, **self._constants, **self._options)
        else:
            self._handle[grid](*arguments, *self._values)
