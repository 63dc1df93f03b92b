"""Loading in order: headers checked, every layer's `MoeRunner` built, then weights, one layer at a time.

Knows no architecture: a `Family` says which tensors there are and builds its own parts from them.
"""

import logging
from pathlib import Path

import torch

from loaders.checkpoint import Checkpoint
from loaders.dummy import DummyCheckpoint
from loaders.naming import RenamedSource, with_model_prefix
from loaders.phases import Phase, StartPhases
from loaders.progress import Progress
from loaders.source import TensorSource
from model.attention.base import Attention, AttentionDtypes, make_attention
from model.config import ModelSettings
from model.decoder import DecoderLayer, Model
from model.embedding import Embedding, OutputHead
from model.families.base import EMBEDDING_WEIGHT, HEAD, HEAD_WEIGHT, Family
from model.fused import fused_kernels
from model.linear import LinearWeight
from model.moe_build import MoeBuilder
from model.norm import RmsNorm
from model.read_ahead import ExpertReader
from model.rope import RotaryTable
from model.weights import RAGGED_ROWS, WeightReader, check_shapes, dummy_shapes
from moe.group import Group, RankGroups

_ALONE = RankGroups()
_log = logging.getLogger(__name__)


def load_model(
    family: Family, folder: Path, settings: ModelSettings, groups: RankGroups = _ALONE,
    phases: StartPhases | None = None,
) -> Model:  # fmt: skip
    """Build this rank's part of the model of `family` from the checkpoint in `folder`; errors as `build_model` says."""
    phases = phases or StartPhases()
    family.check_layout(settings.layout)
    layers, place = range(family.num_layers), settings.layout.dense_place
    with phases.phase(Phase.HEADERS):
        source = open_source(family, folder, settings)
        family.skip_unneeded(source)
        check_shapes(source, family.tensor_specs(source))
        builder = MoeBuilder(settings=settings, layer=family.moe, groups=groups, phases=phases)
        for layer in layers:
            if family.is_moe_layer(layer):
                builder.resolve(layer, family.expert_format(source, layer))
    attention = make_attention(
        settings.attention_backend,
        [family.attention_part(layer, place) for layer in layers],
        settings.device,
        AttentionDtypes(model=settings.model_dtype, kv=settings.cache_dtype),
    )
    builder.connect()
    rope = RotaryTable(family.rope, family.rotary_dim, family.max_model_len, settings.device)

    reader = WeightReader(source, settings.device, settings.model_dtype, place, keeps_fp8(settings))
    with phases.phase(Phase.WEIGHTS, total=family.num_layers):
        weight_UH, first_row = reader.embedding(EMBEDDING_WEIGHT)
        embedding = Embedding(weight_UH, first_row=first_row, tp=groups.tp)
        loaded = _load_layers(family, reader, builder, attention, groups.tp, phases)
        model = Model(
            embedding=embedding,
            layers=loaded,
            norm=RmsNorm(reader.vector("model.norm.weight"), family.norm_eps),
            head=OutputHead(_head_weight(family, reader, embedding), tp=groups.tp),
            rope=rope,
            attention=attention,
            groups=groups,
            vocab_size=family.vocab_size,
            max_model_len=family.max_model_len,
            eos_token_ids=family.eos_token_ids,
            balance=builder.balance,
        )
        phases.advance(Phase.WEIGHTS, 0, num_bytes=source.num_bytes_read)
    source.finish()
    return model


def keeps_fp8(settings: ModelSettings) -> bool:
    """Whether FP8 linear layers are multiplied as they are stored: on GPUs, in bf16. Else they are dequantized once."""
    return settings.model_dtype == torch.bfloat16 and fused_kernels(settings.device) is not None


def open_source(family: Family, folder: Path, settings: ModelSettings) -> TensorSource:
    """The tensors of the checkpoint under the family's names, or random ones of its shapes; reads headers only."""
    if settings.load_format == "dummy":
        return DummyCheckpoint(dummy_shapes(family.tensor_specs(None)), device=settings.device)
    source = RenamedSource(Checkpoint.open(folder), with_model_prefix)
    if family.is_head_tied and EMBEDDING_WEIGHT not in source and HEAD_WEIGHT in source:
        # Of two tensors that share memory, safetensors keeps the one whose name sorts first.
        return RenamedSource(source, lambda name: EMBEDDING_WEIGHT if name == HEAD_WEIGHT else name)
    return source


def _head_weight(family: Family, reader: WeightReader, embedding: Embedding) -> LinearWeight:
    """This rank's rows of the output head.

    A tied model stores none or a copy of the embedding; a different one is used, with a warning. transformers decides
    the same, so the model answers here as it did for its uploader.
    """
    source = reader.source
    if not family.is_head_tied:
        return reader.linear(HEAD, RAGGED_ROWS)
    if HEAD_WEIGHT not in source:
        return embedding.weight
    meta = source.meta(HEAD_WEIGHT)
    span = RAGGED_ROWS.span(HEAD_WEIGHT, family.vocab_size, 1, reader.place)
    own = slice(span.start, span.stop)
    if meta.dtype == source.meta(EMBEDDING_WEIGHT).dtype and torch.equal(
        source.view(HEAD_WEIGHT)[own], source.view(EMBEDDING_WEIGHT)[own]
    ):
        return embedding.weight
    _log.warning(
        "%s: differs from the embedding, although config.json says tie_word_embeddings: true; the stored head is used",
        meta.where,
    )
    return reader.linear(HEAD, RAGGED_ROWS)


def _load_layers(
    family: Family, reader: WeightReader, builder: MoeBuilder, attention: Attention, tp: Group, phases: StartPhases
) -> list[DecoderLayer]:
    settings, loaded = builder.settings, []
    with (
        Progress("loading weights", family.num_layers) as progress,
        ExpertReader(
            lambda layer: family.read_experts(reader, layer, builder.topology.place, builder.held_experts(layer)),
            [layer for layer in range(family.num_layers) if family.is_moe_layer(layer)],
            settings.device,
            phases,
            is_ahead=settings.device.type != "cpu" and settings.load_format != "dummy",
        ) as experts,
    ):
        for layer in range(family.num_layers):
            loaded.append(_load_layer(family, reader, builder, attention, experts, tp, layer))
            phases.advance(Phase.WEIGHTS, num_bytes=reader.source.num_bytes_read)
            progress.advance()
    return loaded


def _load_layer(
    family: Family,
    reader: WeightReader,
    builder: MoeBuilder,
    attention: Attention,
    experts: ExpertReader,
    tp: Group,
    layer: int,
) -> DecoderLayer:
    input_norm, mlp_norm = (
        RmsNorm(reader.vector(f"model.layers.{layer}.{name}.weight"), family.norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    attention_layer = family.read_attention(reader, layer, attention, tp)
    if family.is_moe_layer(layer):
        parts = family.read_moe_parts(reader, layer)
        return DecoderLayer(
            input_norm=input_norm,
            attention=attention_layer,
            mlp_norm=mlp_norm,
            mlp=builder.build(layer, parts, lambda: experts.take(layer)),
        )
    mlp = family.read_dense_mlp(reader, layer, tp)
    return DecoderLayer(input_norm=input_norm, attention=attention_layer, mlp_norm=mlp_norm, mlp=mlp)
