"""A rank reads its slices of the checkpoint and nothing else: bytes that leave the mapped file, and sizes in memory."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loaders import safetensors_file
from loaders.hf_config import read_config
from model.config import ModelSettings
from model.families.base import MoeParts
from model.load import open_source
from model.moe_build import MoeBuilder
from model.moe_layer import MoeLayer
from model.parallel import ParallelLayout
from model.registry import build_model, make_family
from model.sizes import measure_model
from moe import MoeBackend
from moe.device import Device
from moe.formats import ExpertWeights
from moe.group import RankGroups
from tests.model.parallel_checkpoints import write_checkpoint
from tests.model.rank_threads import load_rank, run_layout
from tests.model.test_sizes import dense_bytes

EXPERTS = ".mlp.experts."


class ReadBytes(TorchDispatchMode):
    """Counts what operators read of mapped files; views read nothing."""

    def __init__(self, mapped: set[int]) -> None:
        super().__init__()
        self.mapped, self.total = mapped, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith("aten::new_"):  # which ask only for dtype and device
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in self.mapped:
                    self.total += leaf.nbytes
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Counts the memory that new tensors hold; mapped files are none of it."""

    def __init__(self, mapped: set[int]) -> None:
        super().__init__()
        self.mapped, self.now, self.peak = mapped, 0, 0
        self._held: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in self.mapped:
                self._hold(leaf.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held:
            self.now += size
            self.peak = max(self.peak, self.now)
            self._held[key] = weakref.ref(storage, lambda _: self._free(key, size))

    def _free(self, key: int, size: int) -> None:
        del self._held[key]
        self.now -= size


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses of the files that were mapped."""
    seen: set[int] = set()
    map_file = safetensors_file._map_file

    def map_and_remember(path: Path) -> torch.Tensor:
        tensor = map_file(path)
        seen.add(tensor.untyped_storage().data_ptr())
        return tensor

    monkeypatch.setattr(safetensors_file, "_map_file", map_and_remember)
    return seen


def whole_bytes(folder: Path) -> int:
    """Of tensors that every rank reads whole."""
    family = make_family(read_config(folder))
    source = open_source(family, folder, ModelSettings())
    specs = [spec for spec in family.tensor_specs(source) if spec.split is None and EXPERTS not in spec.name]
    prefixes = tuple(f"{spec.name}.weight" if spec.is_linear else spec.name for spec in specs)
    return sum(source.meta(name).nbytes for name in source.names() if name.startswith(prefixes))


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek"])
def test_bytes_read_are_those_of_the_slices(tmp_path: Path, mapped: set[int], kind: str) -> None:
    folder = write_checkpoint(kind, tmp_path / kind)
    settings: dict[str, Any] = {"selfcheck": "off", "moe_backend": MoeBackend.TORCH}

    def bytes_read(layout: ParallelLayout, groups: RankGroups) -> int:
        with ReadBytes(mapped) as reads:
            load_rank(folder, layout, groups, **settings)
        return reads.total

    alone = bytes_read(ParallelLayout(), RankGroups())
    stored = measure_model(folder, ModelSettings()).stored_bytes
    assert 0.99 * stored < alone < 1.01 * stored, "every tensor is read once"
    whole = whole_bytes(folder)
    assert whole < stored / 4
    for layout in ({"tp_size": 2}, {"tp_size": 2, "ep_size": 2}):
        reads = run_layout(layout, bytes_read)
        assert abs(sum(reads) - stored - whole) < 0.02 * stored, layout
        assert max(reads) < whole + 0.67 * (stored - whole), "GPT-OSS has three scale blocks for two ranks"
    experts = sum(path.num_layers * path.stored_bytes for path in measure_model(folder, ModelSettings()).experts)
    for read in run_layout({"dp_size": 2, "ep_size": 2}, bytes_read):
        assert abs(read - (stored - experts / 2)) < 0.02 * stored


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek"])
def test_reading_a_layer_holds_little_more_than_the_ranks_part(
    tmp_path: Path, mapped: set[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where the device is a GPU, that is all the host memory a rank needs for experts: the next layer waits."""
    folder = write_checkpoint(kind, tmp_path / kind)
    build, peaks = MoeBuilder.build, []

    def build_and_measure(self: MoeBuilder, layer: int, parts: MoeParts, read: Callable[[], ExpertWeights]) -> MoeLayer:
        def measured() -> ExpertWeights:
            with LiveBytes(mapped) as live:
                experts = read()
            assert live.now >= 0.99 * experts.nbytes
            peaks.append(live.peak / experts.nbytes)
            return experts

        return build(self, layer, parts, measured)

    monkeypatch.setattr(MoeBuilder, "build", build_and_measure)
    for sizes in ({"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"dp_size": 2, "ep_size": 2}, {"tp_size": 4}):
        run_layout(sizes, lambda layout, groups: load_rank(folder, layout, groups, selfcheck="off") and None)
    assert len(peaks) == 2 * (2 + 2 + 2 + 4)
    assert max(peaks) < 1.2, peaks


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek", "deepseek_ragged"])
def test_sizes_are_those_of_a_rank(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(kind, tmp_path / kind)

    def check(layout: ParallelLayout, groups: RankGroups) -> int:
        settings: dict[str, Any] = {"dtype": torch.bfloat16, "selfcheck": "off"}
        sizes = measure_model(folder, ModelSettings(layout=layout, **settings))
        model = load_rank(folder, layout, groups, **settings)
        assert sizes.total_bytes - sizes.expert_bytes == dense_bytes(model)
        assert sizes.kv_specs == tuple(model.kv_specs)
        return sizes.expert_bytes

    (alone,) = run_layout({}, check)
    for experts in run_layout({"tp_size": 2, "ep_size": 2}, check):
        assert experts == alone / 2
    run_layout({"tp_size": 4}, check)


def test_fp8_stays_fp8_in_the_sizes_for_a_gpu(tmp_path: Path) -> None:
    """All of attention and the MLPs but the latents' up-projection, at one byte with scales and padding."""
    folder = write_checkpoint("deepseek", tmp_path / "m")
    sizes = {
        (arch, tp_size): measure_model(
            folder,
            ModelSettings(dtype=torch.bfloat16, layout=ParallelLayout(tp_size=tp_size), moe_backend=MoeBackend.TORCH),
            Device(arch=arch),
        ).dense_bytes
        for arch in ("cpu", "sm90") for tp_size in (1, 2, 4)
    }  # fmt: skip
    hidden, heads_k, heads_v, dense, shared = 256, 4 * 64, 4 * 64, 512, 256
    latents = hidden * (128 + 64 + 16)
    num_layers, saved = 3, {}
    for tp_size in (1, 2, 4):
        attention = 128 * heads_k + heads_v * hidden if tp_size < 4 else 0  # a quarter of the heads is half a block
        mlp = 3 * hidden * dense + 2 * 3 * hidden * shared
        saved[tp_size] = num_layers * latents + (num_layers * attention + mlp) // tp_size
        if tp_size == 4:  # two ranks have the two blocks of the shared experts; rank 0 is one of them
            saved[tp_size] += 2 * 3 * hidden * shared // 4
    for tp_size, expected in saved.items():
        difference = sizes["cpu", tp_size] - sizes["sm90", tp_size]
        assert 0.9 * expected < difference < expected, tp_size


def test_one_rank_alone_needs_no_group(tmp_path: Path) -> None:
    folder = write_checkpoint("gpt_oss", tmp_path / "m")
    assert build_model(folder, ModelSettings(selfcheck="off")).groups == RankGroups()
