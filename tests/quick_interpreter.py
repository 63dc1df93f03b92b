"""Starts a program in Triton's interpreter, in half the time: `python -m tests.quick_interpreter MODULE ARGUMENTS`.

The interpreter replaces the functions of `triton.language` anew whenever a kernel calls a function of ours, looks up
the dtype of every number in a table that it makes anew, and checks for integer overflow in eight operations of its own.
Here a launch replaces them once for each module, dtypes are remembered, NumPy checks the same in one operation, and
Python collects garbage less often.
"""

import functools
import gc
import runpy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import semantic
from triton.runtime import interpreter

_ADDRESS = np.dtype(np.uint64)
_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _patch_once_a_launch() -> None:
    launch, patch, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set[int]()

    @functools.wraps(launch)
    def launch_anew(*arguments: Any, **keywords: Any) -> None:
        patched.clear()  # the launch before has put everything back
        launch(*arguments, **keywords)

    def patch_first(fn: Callable[..., Any]) -> Any:
        if id(fn.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(fn.__globals__))
        return patch(fn)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = patch_first


def _check_overflow(self: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
    """In place of `TritonSemantic.binary_op_sanitize_overflow_impl`."""
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    exact = _EXACT[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    is_in_range = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
    assert is_in_range, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"


def quicken() -> None:
    """From now on launches in this process take half the time."""
    gc.set_threshold(50_000)
    _patch_once_a_launch()
    find_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: _ADDRESS if kind.scalar.is_ptr() else find_dtype(kind.scalar)
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow


if __name__ == "__main__":
    quicken()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
