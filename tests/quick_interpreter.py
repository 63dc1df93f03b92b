"""Runs programs in Triton's interpreter, in a third of the time. `tests.interpreter` starts it and gives it orders.

Each program runs in a fork of this process, which has imported torch and Triton: that takes as long as many a program.

The interpreter replaces the functions of `triton.language` anew whenever a kernel calls a function of ours, looks up
the dtype of every number in a table that it makes anew, makes the type and the shape of every result anew, and checks
for integer overflow in eight operations of its own. Here a launch replaces them once for each module, dtypes, types and
shapes are remembered, NumPy checks the same in one operation, and Python collects garbage less often.
"""

import functools
import gc
import json
import math
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

_ADDRESS = np.dtype(np.uint64)
_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_init_first_type, _unwrap_list = core.block_type.__init__, core._unwrap_if_constexpr


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


@functools.cache
def _shape_of_type(*sizes: Any) -> tuple[Any, int, str]:
    """`shape`, `numel` and the beginning of the name of a block's type. Raises for sizes that no block has."""
    kind = object.__new__(core.block_type)
    _init_first_type(kind, core.float32, list(sizes))
    return kind.shape, kind.numel, kind.name.removesuffix(f"{core.float32}>")


def _init_type(self: Any, element: Any, sizes: Any) -> None:
    """In place of `block_type.__init__`."""
    self.shape, self.numel, name = _shape_of_type(*sizes)
    self.element_ty, self.name = element, f"{name}{element}>"


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    """In place of `tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _shape_of(*(kind.shape if kind.is_block() else ()))


@functools.cache
def _shape_of(*sizes: int) -> tuple[Any, Any]:
    """`shape` and `numel` of a tensor."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _unwrap(value: Any) -> Any:
    """In place of `_unwrap_if_constexpr`, which asks in another order."""
    if isinstance(value, core.constexpr):
        return value.value
    return _unwrap_list(value) if isinstance(value, list | tuple | core.tuple) else value


def quicken() -> None:
    """From now on launches in this process take a third of the time."""
    gc.set_threshold(50_000)
    _patch_once_a_launch()
    core.tensor.__init__, core.block_type.__init__, core._unwrap_if_constexpr = _init_tensor, _init_type, _unwrap
    core.block_type.to_ir = lambda self, _builder: self
    find_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: _ADDRESS if kind.scalar.is_ptr() else find_dtype(kind.scalar)
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow


def serve() -> None:
    """Carry out orders until standard input ends: two files for a program's output, its module and its arguments, in a
    line of JSON. The answer is the program's exit status, in a line.
    """
    for line in sys.stdin:
        out, err, *argv = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(argv, out, err)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(argv: list[str], out: str, err: str) -> NoReturn:
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = argv
    status = 1
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()  # no collection walks what was imported
    gc.enable()
    quicken()
    serve()
