"""How much memory one rank's part of a model's weights will take, from config.json and headers alone.

Reads no weight and needs no GPU. Left out are copies that matter to speed alone: a norm's scaled weight and a gate's
bf16 form, a few kB in a layer.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loaders.hf_config import read_config
from loaders.quant import inspect_linear
from loaders.source import TensorSource
from model.attention.base import AttentionDtypes, AttentionSpec, check_attention
from model.batch import KvLayerSpec
from model.config import ModelSettings
from model.families.base import EMBEDDING_WEIGHT, HEAD, Family
from model.load import keeps_fp8, open_source
from model.moe_build import check_backend, rank_config
from model.registry import make_family
from model.weights import TensorSpec, check_shapes, is_between_blocks
from moe import MoeBackend
from moe.choose.select import choose_backend, probe_device
from moe.device import Device
from moe.dispatch.transport import dispatch_formats
from moe.formats import FORMATS
from moe.kernels.layout import packed_bytes
from moe.registry import load_backend

_BYTES_PER_ROTATION = 4  # cos and sin of a pair, fp32 each, cover two numbers of a head
_EXPERTS = ".mlp.experts."  # in the name of every tensor of the routed experts


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPath:
    """The MoE layers of one number format: who runs them, and bytes of one layer as stored and as processed."""

    backend: MoeBackend
    format_name: str
    num_layers: int
    stored_bytes: int
    processed_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What the activations of a step grow with: numbers per token, of the widest layer, and the vocabulary."""

    hidden_size: int
    attention_width: int  # queries, keys, values and attention output
    experts_width: int  # of all experts of a token: gate, up, their product and the output
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Bytes of one rank's part of a loaded model, and what its cache and its steps depend on."""

    stored_bytes: int  # in the files
    embedding_bytes: int
    head_bytes: int  # 0 if the head is the embedding
    dense_bytes: int  # attention, norms, gates, dense and shared MLPs, the rotary table
    experts: tuple[ExpertPath, ...]
    dtype: torch.dtype
    kv_specs: tuple[KvLayerSpec, ...]
    max_model_len: int
    step: StepShape

    @property
    def expert_bytes(self) -> int:
        """Processed experts of all layers."""
        return sum(path.num_layers * path.processed_bytes for path in self.experts)

    @property
    def total_bytes(self) -> int:
        """All weights, processed."""
        return self.embedding_bytes + self.head_bytes + self.dense_bytes + self.expert_bytes

    @property
    def least_bytes(self) -> int:
        """All weights if experts that would grow stay as they are stored, as `--moe-backend torch` keeps them."""
        return self.as_stored().total_bytes

    def as_stored(self) -> "ModelSizes":
        """The sizes if experts that would grow stay as they are stored."""
        experts = (replace(path, processed_bytes=min(path.processed_bytes, path.stored_bytes)) for path in self.experts)
        return replace(self, experts=tuple(experts))

    @property
    def peak_bytes(self) -> int:
        """The most while loading, an estimate from above. When the last layer is processed, its stored form, and its
        processed form twice, stand beside all but the head, which is read after the layers.

        Twice, because a backend may lay experts out one by one before it joins them.
        """
        last_layer = max((path.stored_bytes + path.processed_bytes for path in self.experts), default=0)
        return max(self.total_bytes, self.total_bytes - self.head_bytes + last_layer)


def measure_model(folder: Path, settings: ModelSettings, device: Device | None = None) -> ModelSizes:
    """Sizes of the model in `folder`, loaded with `settings`.

    `device` is the GPU to plan for, which need not be here, so that only its hardware counts; None is
    `settings.device`, on which a backend whose package is missing does not count. Settings that `build_model` would
    refuse from headers alone are refused here too, with its errors; no weight is read.
    """
    family = make_family(read_config(folder))
    family.check_layout(settings.layout)
    source = open_source(family, folder, settings)
    family.skip_unneeded(source)
    specs = list(family.tensor_specs(source))
    check_shapes(source, specs)
    layers = range(family.num_layers)
    parts = [family.attention_part(layer, settings.layout.dense_place) for layer in layers]
    check_attention(
        settings.attention_backend, parts, settings.device,
        AttentionDtypes(model=settings.model_dtype, kv=settings.cache_dtype), device,
    )  # fmt: skip
    dense = [spec for spec in specs if _EXPERTS not in spec.name]
    held = _held_bytes(source, dense, settings, fp8=_keeps_fp8(settings, device))
    embedding, head = held.pop(EMBEDDING_WEIGHT), held.pop(HEAD, 0)
    return ModelSizes(
        stored_bytes=sum(source.meta(name).nbytes for name in source.names()),
        embedding_bytes=embedding,
        head_bytes=head,
        dense_bytes=sum(held.values()) + family.max_model_len * family.rotary_dim * _BYTES_PER_ROTATION,
        experts=_expert_paths(family, source, settings, device),
        dtype=settings.model_dtype,
        kv_specs=tuple(part.kv_spec for part in parts),
        max_model_len=family.max_model_len,
        step=_step_shape(family, parts),
    )


def _held_bytes(source: TensorSource, specs: list[TensorSpec], settings: ModelSettings, *, fp8: bool) -> dict[str, int]:
    """Bytes of this rank's part of each tensor as the model keeps it: linear layers in the model's dtype or, with
    `fp8`, FP8 blocks as `fp8_linear` packs them; the rest in fp32.
    """
    dtype, place = settings.model_dtype, settings.layout.dense_place
    of_linear = {spec.name: torch.float32 if spec.is_fp32 else dtype for spec in specs if spec.is_linear}
    held = {}
    for spec in specs:
        layout = inspect_linear(source, spec.name) if spec.is_linear else None
        block = FORMATS[layout.format_name].col_block if layout else 1
        stays_fp8 = fp8 and spec.keeps_fp8 and layout is not None and layout.format_name == "fp8_block"
        shape = list(spec.shape)
        if spec.split is not None:
            axis = 0 if spec.split.axis == "rows" else -1
            span = spec.split.span(spec.name, shape[axis], block, place)
            stays_fp8 = stays_fp8 and is_between_blocks(span, shape[axis])
            shape[axis] = len(span)
        if spec.name == EMBEDDING_WEIGHT:
            kept = dtype
        else:
            kept = of_linear.get(spec.name, of_linear.get(spec.name.removesuffix(".bias"), torch.float32))
        held[spec.name] = math.prod(shape) * kept.itemsize
        if stays_fp8:
            held[spec.name] = packed_bytes("fp8_block", *shape, is_gated=False, has_bias=False)
    return held


def _keeps_fp8(settings: ModelSettings, device: Device | None) -> bool:
    """As `load.keeps_fp8`, for a GPU that need not be here."""
    if device is None:
        return keeps_fp8(settings)
    return settings.model_dtype == torch.bfloat16 and device.arch != "cpu"


def _expert_paths(
    family: Family, source: TensorSource, settings: ModelSettings, device: Device | None
) -> tuple[ExpertPath, ...]:
    layers: dict[str, list[int]] = {}
    for layer in range(family.num_layers):
        if family.is_moe_layer(layer):
            layers.setdefault(family.expert_format(source, layer), []).append(layer)
    a2a, formats = settings.moe_a2a_backend, dispatch_formats(settings.moe_a2a_backend, settings.deepep.mode)
    paths = []
    for format_name, of_format in layers.items():
        config = rank_config(family.moe, settings, format_name)
        backend = choose_backend(
            settings.moe_backend, device or settings.device, format_name, a2a, config, formats, is_logged=False
        )  # fmt: skip
        check_backend(backend, settings, (device or probe_device(settings.device)).arch)
        names = [name for name in source.names() if name.startswith(f"model.layers.{of_format[0]}{_EXPERTS}")]
        stored_bytes = sum(source.meta(name).nbytes for name in names) // settings.layout.num_ranks
        stored_bytes = stored_bytes * config.num_experts // family.moe.num_experts  # with replicas
        paths.append(
            ExpertPath(
                backend=backend,
                format_name=format_name,
                num_layers=len(of_format),
                stored_bytes=stored_bytes,
                processed_bytes=load_backend(backend).layer_bytes(
                    format_name, config, device or probe_device(settings.device)
                ),
            )
        )
    return tuple(paths)


def _step_shape(family: Family, specs: list[AttentionSpec]) -> StepShape:
    experts = family.moe.shape
    return StepShape(
        hidden_size=family.hidden_size,
        attention_width=max(
            (spec.num_heads + spec.num_kv_heads) * (spec.key_dim + spec.value_dim) for spec in specs
        ),
        experts_width=experts.top_k * (3 * experts.intermediate_size + experts.hidden_size),
        vocab_size=family.vocab_size,
    )  # fmt: skip
