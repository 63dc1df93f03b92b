"""The contract of every backend, with its library emulated: right results on any ranks, exact zeros, refusals."""

import dataclasses
import importlib.metadata
import sys
from typing import Any

import pytest
import torch

from moe import ExpertShape, MoeRunner, MoeRunnerConfig, StandardDispatchOutput, StandardTopK, Topology
from moe.backends.flashinfer.common import parse_version
from moe.check.selfcheck import check_layer
from moe.config import MoeA2ABackend, MoeBackend
from moe.device import Device
from moe.errors import MoeConfigError, SelfCheckError, UnsupportedPathError, WeightFormatError
from moe.formats import ExpertWeights
from moe.registry import BACKEND_MODULES, load_backend
from tests.moe.backends import contract, hostile
from tests.moe.backends.contract import AITER, CUTEDSL, CUTLASS, LIMITS, MXFP4, NONE, PATHS, TRTLLM, E, K, Limits, Path
from tests.moe.moe_layers import GPT_OSS
from tests.tables import rows

RANKS = [(4, 1), (1, 8), (2, 2)]  # tp, ep; of 8 expert-parallel ranks, one has the expert that nobody wants


def full_of_nan(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@rows("path", *PATHS)
def test_one_rank_equals_the_reference(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """For no token, one and many; the factor in the weights scales the output once."""
    emulator = contract.install(monkeypatch, path.backend, path.arch)
    experts = contract.make_experts(path, 2)
    run = contract.prepare(path, experts, Topology(allocator=full_of_nan))
    for count in (0, 1, *path.counts):
        x, topk = contract.tokens(path, count), hostile.routing(count, E, K)
        result = run(x, topk)
        got = result.hidden_states
        assert (got.shape, result.is_partial, got.is_contiguous()) == (x.shape, False, True)
        if not count:
            continue
        unrounded = contract.exact(path, emulator, result)
        assert hostile.relative_error(unrounded, contract.expected(path, x, topk, experts)) < path.tolerance
        assert torch.equal(got, unrounded.to(got.dtype)), "rounded once"
        assert got.dtype == (torch.float32 if path.backend is contract.DEEP_GEMM else path.dtype)
        assert not got[2:3].any(), "all ids of this token are -1"
        half = contract.exact(path, emulator, run(x, StandardTopK(topk.weights / 2, topk.ids)))
        assert hostile.relative_error(unrounded, 2 * half) < 1e-6


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_all_ranks_sum_to_one(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    emulator = contract.install(monkeypatch, path.backend, path.arch)
    experts, x, topk = contract.make_experts(path), contract.tokens(path), hostile.routing(contract.T, E, K)
    want = contract.expected(path, x, topk, experts)
    for tp_size, ep_size in RANKS:
        total, parts = torch.zeros(x.shape), torch.zeros(x.shape)
        for topology, local, result in contract.run_ranks(path, x, topk, tp_size, ep_size):
            total += contract.exact(path, emulator, result)
            if contract.splits_a_token_scale(path):
                parts += contract.expected(path, x, topk, local, topology.expert_range(E).start)
        with subtests.test(tp_size=tp_size, ep_size=ep_size):
            whole = parts if contract.splits_a_token_scale(path) else want
            assert hostile.relative_error(total, whole) < path.tolerance


@rows("path", *PATHS)
def test_ids_of_minus_one_add_exactly_zero(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Whatever their weights are, and whatever was in the memory that the result is written to."""
    emulator = contract.install(monkeypatch, path.backend, path.arch)
    experts = contract.make_experts(path, 2)
    run = contract.prepare(path, experts, Topology(allocator=full_of_nan))
    for count in path.counts:
        x, topk = contract.tokens(path, count), hostile.routing(count, E, K)
        holes = (torch.rand(count, K, generator=torch.Generator().manual_seed(9)) < 0.3) | (topk.ids < 0)
        ids = topk.ids.masked_fill(holes, -1)
        poisoned = StandardTopK(topk.weights.masked_fill(holes, float("nan")), ids)
        result = run(x, poisoned)
        want = contract.expected(path, x, StandardTopK(topk.weights, ids), experts)
        assert hostile.relative_error(contract.exact(path, emulator, result), want) < path.tolerance
        assert not result.hidden_states[(ids < 0).all(-1)].any()
        nobody = StandardTopK(torch.full_like(topk.weights, float("nan")), torch.full_like(ids, -1))
        assert not run(x, nobody).hidden_states.any()


@rows("path", *PATHS)
def test_the_self_check_passes_and_names_a_lost_expert(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    contract.install(monkeypatch, path.backend, path.arch)
    experts, backend = contract.make_experts(path, 2), load_backend(path.backend)
    config = contract.config_of(path, experts, Topology())
    runner = MoeRunner(path.backend, NONE, config)
    info = backend.prepare(experts, config, Topology())
    report = check_layer(runner, info, experts, layer=7, topology=Topology())
    assert report.worst_error <= report.tolerance
    broken = backend.prepare(hostile.lost_expert(experts), config, Topology())
    with pytest.raises(SelfCheckError, match=f"layer 7, {path.backend}/none/{path.format_name}: expert 2 differs"):
        check_layer(runner, broken, experts, layer=7, topology=Topology())


@rows("path", *[path for path in PATHS if path.is_flashinfer])
def test_the_answer_comes_from_the_topologys_allocator(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    contract.install(monkeypatch, path.backend, path.arch)
    made = []

    def record(*arguments: Any) -> torch.Tensor:
        made.append(full_of_nan(*arguments))
        return made[-1]

    x, topk = contract.tokens(path), hostile.routing(contract.T, E, K)
    got = contract.prepare(path, contract.make_experts(path, 2), Topology(allocator=record))(x, topk).hidden_states
    assert [tensor.data_ptr() for tensor in made] == [got.data_ptr()]
    assert bool(got.isfinite().all())


# ---- refusals ----


def experts_of(name: str, hidden: int = 256, inter: int = 256, *, has_biases: bool = False) -> ExpertWeights:
    return hostile.plain_experts(name, E, hidden, inter, has_biases=has_biases)


@rows("backend, limits", *LIMITS.items())
def test_what_supports_refuses(backend: MoeBackend, limits: Limits) -> None:
    entry, name = load_backend(backend), next(iter(load_backend(backend).formats))

    def reason(arch: str = limits.installed_on, name: str = name, a2a: MoeA2ABackend = NONE, **changes: Any) -> str:
        config = hostile.make_config(E, **({"hidden": 256, "inter": 256, "top_k": K} | changes))
        return entry.supports(Device(arch=arch), name, a2a, config) or ""

    assert {a2a for a2a in MoeA2ABackend if not reason(a2a=a2a)} == set(limits.transports)
    wrong_format, wrong_arch = limits.wrong_arch
    assert f"{wrong_format} on {wrong_arch} is not supported; it runs on" in reason(wrong_arch, wrong_format)
    assert f"format {limits.wrong_format} is not supported; it takes" in reason(name=limits.wrong_format)
    assert "dtype torch.float32 is not supported" in reason(dtype=torch.float32)
    assert "no_combine is not supported" in reason(no_combine=True)
    assert "apply_router_weight_on_input is not supported" in reason(apply_router_weight_on_input=True, top_k=1)
    if limits.wrong_size is not None:
        size_format, hidden, inter = limits.wrong_size
        arch = {AITER: "gfx950"}.get(backend, limits.installed_on)
        assert "of this rank is" in reason(arch, size_format, hidden=hidden, inter=inter)
    if limits.no_biases is not None:
        assert f"{limits.no_biases} experts with biases" in reason(name=limits.no_biases, has_biases=True)
    if limits.only_plain is not None:
        assert "only plain SwiGLU" in reason(name=limits.only_plain, activation=GPT_OSS)


@rows("backend, limits", *LIMITS.items())
def test_what_prepare_refuses(monkeypatch: pytest.MonkeyPatch, backend: MoeBackend, limits: Limits) -> None:
    contract.install(monkeypatch, backend, limits.installed_on)
    entry = load_backend(backend)

    def refuses(experts: ExpertWeights, error: type[Exception], words: str, **changes: Any) -> None:
        config = hostile.make_config(E, experts.hidden_size, experts.intermediate_size, K, **changes)
        with pytest.raises(error, match=words):
            entry.prepare(experts, config, Topology())

    refuses(experts_of(limits.wrong_format), WeightFormatError, f"takes .* experts, got {limits.wrong_format}")
    if limits.wrong_size is not None:
        refuses(experts_of(*limits.wrong_size), WeightFormatError, "of this rank is .*needs a positive multiple of")
        last = Topology(tp_size=8, tp_rank=7)
        shape = ExpertShape(num_experts=E, top_k=K, hidden_size=256, intermediate_size=256)
        nothing = hostile.shard(experts_of(limits.wrong_size[0]), tp=(8, 7), block=128)
        with pytest.raises(WeightFormatError, match="intermediate_size of this rank is 0"):
            entry.prepare(nothing, MoeRunnerConfig(shape=shape, place=last.place, scale_block=128), last)
    name = next(iter(entry.formats))
    if limits.no_biases is not None:
        biased = experts_of(limits.no_biases, has_biases=True)
        refuses(biased, WeightFormatError, f"{limits.no_biases} experts with biases are not supported")
    if limits.only_plain is not None:
        refuses(experts_of(limits.only_plain), UnsupportedPathError, "only plain SwiGLU", activation=GPT_OSS)
    wrong_format, wrong_arch = limits.wrong_arch
    monkeypatch.setattr(type(entry), "arch_of", lambda self, device: wrong_arch)
    refuses(experts_of(wrong_format), UnsupportedPathError, f"{wrong_format} on {wrong_arch} is not supported")
    monkeypatch.setitem(sys.modules, entry.package, None)
    refuses(experts_of(name), UnsupportedPathError, f"--moe-backend {backend} needs .*{entry.package}.*not installed")


@rows("backend", *[backend for backend in BACKEND_MODULES if backend is not MoeBackend.TRITON])
def test_what_the_kernels_would_ignore_is_refused(monkeypatch: pytest.MonkeyPatch, backend: MoeBackend) -> None:
    """Overlap arguments; and weights that another backend prepared, where kernels have several kinds."""
    path = contract.path_of(backend)
    contract.install(monkeypatch, backend, path.arch)
    experts = contract.make_experts(path, 2)
    config = contract.config_of(path, experts, Topology())
    info = load_backend(backend).prepare(experts, config, Topology())
    runner = MoeRunner(backend, NONE, config)
    dispatched = StandardDispatchOutput(contract.tokens(path, 3), hostile.routing(3, E, K))
    runner.set_overlap_args("stream")
    with pytest.raises(MoeConfigError, match="cannot overlap"):
        runner.run(dispatched, info)
    if backend in (CUTLASS, TRTLLM, MXFP4):
        with pytest.raises(MoeConfigError, match="cannot run a str"):
            runner.run(dispatched, "weights")
    if backend is not MoeBackend.TORCH:
        with pytest.raises(UnsupportedPathError, match="no_combine"):
            MoeRunner(backend, NONE, dataclasses.replace(config, no_combine=True))


@rows("backend, name", (CUTLASS, "nvfp4"), (CUTLASS, "fp8_tensor"), (TRTLLM, "nvfp4"), (CUTEDSL, "nvfp4"))
def test_expert_parallelism_needs_layer_scales(monkeypatch: pytest.MonkeyPatch, backend: MoeBackend, name: str) -> None:
    path = contract.path_of(backend, format_name=name)
    contract.install(monkeypatch, backend, path.arch)
    topology, whole = Topology(ep_size=2, ep_rank=1), contract.make_experts(path, 2)
    with pytest.raises(WeightFormatError, match="layer_input_scales"):
        contract.prepare(path, hostile.shard(whole, ep=(2, 1)), topology)


@rows(
    "backend, too_old, oldest",
    (CUTLASS, "0.6.7", "0.6.8"),
    (CUTEDSL, "0.6.7", "0.6.8"),
    (TRTLLM, "0.5.9", "0.6.0"),
    (MXFP4, "0.6.10", "0.6.11"),
)
def test_flashinfers_versions(monkeypatch: pytest.MonkeyPatch, backend: MoeBackend, too_old: str, oldest: str) -> None:
    path = contract.path_of(backend)
    contract.install(monkeypatch, backend, path.arch)

    def prepare_with(installed: str | None) -> None:
        def version(package: str) -> str:
            if installed is None or package != "flashinfer-python":
                raise importlib.metadata.PackageNotFoundError(package)
            return installed

        monkeypatch.setattr(importlib.metadata, "version", version)
        contract.prepare(path, contract.make_experts(path, 2), Topology())

    words = rf"--moe-backend {backend} needs flashinfer-python {oldest} or newer and found {too_old}"
    with pytest.raises(UnsupportedPathError, match=words):
        prepare_with(too_old)
    for good in (oldest, f"{oldest}rc1", "0.7.2.post1"):
        prepare_with(good)
    with pytest.raises(UnsupportedPathError, match="pip install flashinfer-python"):
        prepare_with(None)


@rows("text, version", ("0.7.2.post1", (0, 7, 2)), ("0.6.11rc1", (0, 6, 11)), ("1.0", (1, 0, 0)),
                        ("0.6.8+cu130", (0, 6, 8)))  # fmt: skip
def test_version_numbers(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version
