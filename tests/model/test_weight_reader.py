"""A rank's rows and columns of linear layers: bit for bit a slice of the whole, in every format and at any cut."""

from pathlib import Path

import pytest
import torch

from loaders.checkpoint import Checkpoint
from loaders.hf_config import read_config
from model.attention.base import make_attention
from model.decoder import StepState
from model.registry import make_family
from model.rope import RotaryTable
from model.weights import WeightReader
from moe import MoeConfigError, RankPlace
from tests.loaders.expert_files import FORMATS, linear_tensors, random_bf16, save
from tests.model.checkpoints import make_deepseek, make_gpt_oss, pack_fp8, state_by_file_name, write
from tests.model.paged import PagedCache
from tests.tables import rows

CPU = torch.device("cpu")


def readers(source: Checkpoint, tp_size: int, dtype: torch.dtype = torch.float32) -> list[WeightReader]:
    """One for every rank."""
    places = [RankPlace(tp_size=tp_size, tp_rank=rank) for rank in range(tp_size)]
    return [WeightReader(source, CPU, dtype, place) for place in places]


@rows("tp_size", 1, 2, 3, 4)
@rows("unit", 1, 32)
@rows("kind", *FORMATS)
def test_parts_of_a_matrix_are_slices_of_the_whole(tmp_path: Path, kind: str, unit: int, tp_size: int) -> None:
    """Of 384 rows or columns, 2 ranks have one block of 128 and a half, 4 ranks three quarters of one."""
    tensors, meant = linear_tensors("l", random_bf16(384, 384), kind)
    source = save(tmp_path, tensors)
    ranks = readers(source, tp_size)
    rows, columns = [r.rows("l", unit) for r in ranks], [r.columns("l", unit) for r in ranks]
    assert {tuple(part.shape) for part in rows} == {(384 // tp_size, 384)}
    assert torch.equal(torch.cat(rows), meant)
    assert torch.equal(torch.cat(columns, dim=1), meant)
    assert all(part.is_contiguous() for part in (*rows, *columns))
    assert torch.equal(ranks[-1].matrix("l"), meant)


@rows("kind", *FORMATS)
def test_rows_are_cut_anywhere(tmp_path: Path, kind: str) -> None:
    """Twelve rows a rank: fewer than any group of columns that share a scale."""
    tensors, meant = linear_tensors("l", random_bf16(36, 64), kind)
    assert torch.equal(torch.cat([rank.rows("l") for rank in readers(save(tmp_path, tensors), 3)]), meant)


def test_a_ragged_last_block_belongs_to_the_last_rank(tmp_path: Path) -> None:
    tensors, meant = linear_tensors("l", random_bf16(200, 150), "fp8_block")
    ranks = readers(save(tmp_path, tensors), 2)
    assert torch.equal(torch.cat([rank.rows("l") for rank in ranks]), meant)
    assert torch.equal(torch.cat([rank.columns("l") for rank in ranks], dim=1), meant)


def test_only_the_blocks_of_a_part_are_looked_at(tmp_path: Path) -> None:
    """A NaN in the other rank's scales is the other rank's to refuse."""
    tensors, meant = linear_tensors("l", random_bf16(512, 128), "fp8_block")
    tensors["l.weight_scale_inv"][3] = float("nan")
    first, second = readers(save(tmp_path, tensors), 2)
    assert torch.equal(first.rows("l"), meant[:256])
    with pytest.raises(ValueError, match=r"'l\.weight_scale_inv': a scale must be .* found nan"):
        second.rows("l")


def test_biases_are_cut_like_rows_and_count_once_behind_columns(tmp_path: Path) -> None:
    tensors, meant = linear_tensors("l", random_bf16(64, 96), "bf16")
    bias = random_bf16(64, seed=5)
    ranks = readers(save(tmp_path, tensors | {"l.bias": bias}), 4)
    parts = [rank.rows_and_bias("l", unit=8) for rank in ranks]
    assert torch.equal(torch.cat([part for _, part in parts]), bias.float())
    assert torch.equal(torch.cat([rank.entries("l.bias") for rank in ranks]), bias.float())
    x_TK = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(3, 64)
    for x_part, rank in zip(x_TK.chunk(4, dim=1), ranks, strict=True):
        weight, added = rank.columns_and_bias("l", unit=8)
        total += x_part @ weight.T + added
    torch.testing.assert_close(total, x_TK @ meant.T + bias.float())


@rows(
    "tp_size, unit, words",
    (3, 1, "tp_size is 3: it must divide the rows of 'l.weight', 64 elements in units of 1"),
    (4, 32, "tp_size is 4: it must divide the rows of 'l.weight', 64 elements in units of 32"),
    (2, 24, "it must divide the rows of 'l.weight', 64 elements in units of 24"),
)
def test_heads_that_cannot_be_shared_are_refused(tmp_path: Path, tp_size: int, unit: int, words: str) -> None:
    source = save(tmp_path, linear_tensors("l", random_bf16(64, 96), "bf16")[0])
    with pytest.raises(MoeConfigError, match=words):
        readers(source, tp_size)[0].rows("l", unit)


@rows("kind", "gpt_oss", "deepseek", "deepseek_fp8")
def test_sharded_attention_is_a_reader_with_another_place(tmp_path: Path, kind: str) -> None:
    """The outputs of two ranks, each with half of the heads, add up to those of one that has all."""
    state = state_by_file_name(make_gpt_oss() if kind == "gpt_oss" else make_deepseek(), tmp_path)
    write(tmp_path, pack_fp8(state)[0] if kind == "deepseek_fp8" else state)
    family, source = make_family(read_config(tmp_path)), Checkpoint.open(tmp_path)
    rope = RotaryTable(family.rope, family.rotary_dim, 64, CPU)
    x_TH = torch.randn(8, family.hidden_size, generator=torch.Generator().manual_seed(3))

    def output(reader: WeightReader) -> torch.Tensor:
        spec = family.attention_part(1, reader.place)
        attention, cache = make_attention("torch", [spec], CPU), PagedCache([spec.kv_spec])
        batch = cache.batch({"a": [3, 1, 4, 1, 5], "b": [9, 2, 6]})
        step = StepState(attention.plan(batch), rope.at(batch.positions_T), False)
        out_TH: torch.Tensor = family.read_attention(reader, 1, attention)(x_TH, step, cache.layers[0])
        return out_TH

    parts = [output(reader) for reader in readers(source, 2)]
    torch.testing.assert_close(parts[0] + parts[1], output(readers(source, 1)[0]), rtol=1e-4, atol=1e-5)
    assert not torch.equal(parts[0], parts[1])


def test_ranks_that_outnumber_the_kv_heads_have_copies(tmp_path: Path) -> None:
    state_by_file_name(make_gpt_oss(), tmp_path)
    family = make_family(read_config(tmp_path))
    spec = family.attention_part(0, RankPlace(tp_size=4))
    assert (spec.num_heads, spec.num_kv_heads) == (1, 1)
    shares = [RankPlace(tp_size=4, tp_rank=rank).share("the KV heads", 2, 1, copies=True) for rank in range(4)]
    assert [share.start for share in shares] == [0, 0, 1, 1]
    with pytest.raises(MoeConfigError, match="tp_size is 3: it must divide the KV heads, 2 elements"):
        RankPlace(tp_size=3).share("the KV heads", 2, 1, copies=True)
