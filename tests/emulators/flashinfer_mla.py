"""FlashInfer's own MLA wrapper on a CPU: its checks and planning in Python are real, only its compiled kernels are not.

The emulated kernels attend in fp32 torch. As the real ones, they read the plan from the integer workspace and the page
ids from the buffer that they are given, so a call that is repeated with the same arguments, as a graph repeats it, sees
what was planned last. A repeated call whose grid would have changed is refused.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NUM_PROCESSORS = 132
_OURS = "model.attention"
_FA = "flashinfer.mla._batch_mla._backends"


class Kernels:
    """What the library would compile for one set of dtypes and sizes. `calls` are the arguments of each run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def plan_with_staged_workspace_bytes(
        self, floats: torch.Tensor, ints: torch.Tensor, pinned: torch.Tensor, query_starts: torch.Tensor,
        page_starts: torch.Tensor, lens: torch.Tensor, num_heads: int, dim: int, causal: bool,
    ) -> tuple[list[int], int]:  # fmt: skip
        del floats, pinned, dim, causal
        numbers = torch.cat((torch.tensor([len(lens)]), query_starts, page_starts, lens)).int()
        ints.view(torch.int32)[: len(numbers)] = numbers
        return [_grid(int(query_starts[-1]), num_heads, len(lens))], 4 * len(numbers)

    def run(self, *args: Any) -> None:
        self.calls.append(args)
        _, ints, grid, q_nope, q_pe, ckv, kpe, page_ids, out, _, is_causal, num_heads, page_size, scale, *_ = args
        numbers = ints.view(torch.int32)
        count = int(numbers[0])
        query_starts, page_starts, lens = numbers[1 : 3 * count + 3].long().split((count + 1, count + 1, count))
        assert is_causal
        assert page_size == ckv.shape[1] == kpe.shape[1]
        assert grid == [_grid(int(query_starts[-1]), num_heads, count)], "a captured grid cannot change"
        assert int(query_starts[-1]) == len(q_nope) == len(out)
        for tensor in (q_nope, q_pe, ckv, kpe, out):  # loads of 16 bytes
            assert tensor.dtype == torch.bfloat16
            assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])
            assert tensor.stride(-1) == 1
        out.fill_(float("nan"))
        for request in range(count):
            start, end = query_starts[request : request + 2].tolist()
            pages = page_ids[page_starts[request] : page_starts[request + 1]].long()
            num_keys = int(lens[request])
            latents, ropes = (x[pages].flatten(0, 1)[:num_keys].float() for x in (ckv, kpe))
            logits = q_nope[start:end].float() @ latents.T + q_pe[start:end].float() @ ropes.T
            position = torch.arange(num_keys - end + start, num_keys)[:, None, None]
            hidden = torch.arange(num_keys) > position
            weights = (logits * scale).masked_fill(hidden, -torch.inf).softmax(-1)
            out[start:end] = (weights @ latents).to(out.dtype)


def _grid(num_tokens: int, num_heads: int, num_rows: int) -> int:
    """Blocks of a cluster: two where requests have more than 64 rows of queries times heads."""
    return 2 if num_tokens * num_heads // num_rows > 64 else 1


def _store(spec: Any, kv: Any, slots_T: torch.Tensor, q: Any, keys_T1D: torch.Tensor, *_: Any) -> None:
    kv.keys[slots_T] = keys_T1D


def install(monkeypatch: pytest.MonkeyPatch, arch: str = "sm90") -> Kernels:
    """Lets `FlashInferAttention` run on a CPU as if it were a GPU of this architecture; keys are stored by torch."""
    kernels, common = Kernels(), importlib.import_module(f"{_FA}._fa_common")

    def on_cpu(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        del pin_memory
        return torch.empty(*size, **options)

    torch_on_cpu = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch) if not name.startswith("_")})
    torch_on_cpu.empty = on_cpu
    facts: dict[str, Callable[..., Any]] = {
        "get_compute_capability": lambda device: (int(arch[2:-1]), int(arch[-1])),
        "is_sm90a_supported": lambda device: arch == "sm90",
        "get_device_sm_count": lambda device: NUM_PROCESSORS,
        "_get_fa_shared_memory_limits": lambda device: (233472, 232448),
    }
    for name, fact in facts.items():
        monkeypatch.setattr(common, name, fact)
    monkeypatch.setattr(common, "torch", torch_on_cpu)
    wanted = "fa3" if arch == "sm90" else "fa2"  # the other one is left without kernels
    monkeypatch.setattr(importlib.import_module(f"{_FA}.{wanted}_backend"), "get_batch_mla_module", lambda *_: kernels)
    monkeypatch.setattr(f"{_OURS}.base._arch", lambda device: arch)
    monkeypatch.setattr(f"{_OURS}.flashinfer.num_processors", lambda device, otherwise: NUM_PROCESSORS)
    monkeypatch.setattr(f"{_OURS}.flashinfer.missing_compiler", lambda: None)
    is_supported = classmethod(lambda cls, spec, device: None)
    monkeypatch.setattr(f"{_OURS}.triton.TritonAttention.unsupported_reason", is_supported)
    monkeypatch.setattr(f"{_OURS}.triton._rotate_and_store", _store)
    return kernels
