"""How a plan search is divided: all of it, once, evenly, and never more at a time than the card holds."""

from typing import Any

from benchmarks.moe_groups import FREE_SHARE, PREPARING, Group, batches
from tests.tables import rows

TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096)
LAYERS = [
    ("gpt-oss-20b", "mxfp4"), ("gpt-oss-120b", "mxfp4"), ("deepseek-v3-quarter", "fp8_block"),
    ("deepseek-v3-quarter", "nvfp4"), ("tiny-gpt-oss", "mxfp4"),
]  # fmt: skip


def groups(layers: list[tuple[str, str]] = LAYERS, tokens: tuple[int, ...] = TOKENS, num_sets: int = 6) -> list[Group]:
    return [Group(model=model, format_name=name, tokens=tokens, num_sets=num_sets) for model, name in layers]


def needed(batch: list[Group]) -> float:
    preparing = sorted((group.bytes_preparing for group in batch), reverse=True)[:PREPARING]
    return sum(group.bytes_kept for group in batch) + sum(preparing)


@rows("num_cores", 1, 2, 7, 16, 128)
@rows("free_bytes", 80e9, 30e9, 12e9, 1e9)
def test_everything_is_done_once_and_fits(num_cores: Any, free_bytes: Any) -> None:
    found = batches(groups(), free_bytes, num_cores)
    work = [(g.model, g.format_name, tokens) for batch in found for g in batch for tokens in g.tokens]
    assert sorted(work) == sorted((model, name, tokens) for model, name in LAYERS for tokens in TOKENS)
    for batch in found:
        assert len(batch) <= num_cores
        assert len(batch) == 1 or needed(batch) <= FREE_SHARE * free_bytes


def test_a_card_of_80_gb_takes_five_layers_in_one_batch_on_16_cores_evenly() -> None:
    (batch,) = batches(groups(), 80e9, 16)
    assert len(batch) == 16
    mean = sum(group.work for group in batch) / 16
    assert max(group.work for group in batch) < 2 * mean


@rows(
    "layers, tokens, free_bytes, texts",
    (LAYERS[:1], (1, 16), 80e9, [["gpt-oss-20b mxfp4 1", "gpt-oss-20b mxfp4 16"]]),
    (LAYERS[:1], (1, 16), 1e9, [["gpt-oss-20b mxfp4 1,16"]]),
    ([("deepseek-v3", "fp8_block"), ("deepseek-v3", "nvfp4")], (1,), 40e9,
     [["deepseek-v3 fp8_block 1"], ["deepseek-v3 nvfp4 1"]]),
)  # fmt: skip
def test_groups_are_divided_and_batches_filled_as_far_as_they_fit(
    layers: Any, tokens: tuple[int, ...], free_bytes: float, texts: list[list[str]]
) -> None:
    found = batches(groups(layers, tokens=tokens), free_bytes, 16)
    assert [sorted(map(str, batch)) for batch in found] == texts


def test_copies_are_made_only_where_the_id_sets_alone_would_stay_in_the_l2() -> None:
    copies = {layer: groups([layer])[0].num_copies for layer in LAYERS}
    assert copies["gpt-oss-20b", "mxfp4"](1) == 2  # about 240 MB of 423
    assert copies["gpt-oss-20b", "mxfp4"](4096) == 1
    assert copies["deepseek-v3-quarter", "nvfp4"](1) == 1
    assert copies["tiny-gpt-oss", "mxfp4"](4096) == 8
    (one_set,) = groups(LAYERS[:1], num_sets=1)
    assert one_set.num_copies(1) == 8


def test_taller_plans_are_more_work_and_shared_kernels_are_counted_once() -> None:
    def work(*tokens: int) -> int:
        return groups(LAYERS[:1], tokens=tokens)[0].work

    assert work(1024, 4096) == work(4096)  # tile groups apart, the same kernels
    assert work(1, 4) == work(1) + work(4)  # one token is a special size to the compiler
    assert work(5, 6) < work(5) + work(6)
    assert work(1) == 3 * 3 + 3 * 2, "tiles and splits of the first matrix and of the second"


@rows("format_name, bytes_of_weight", ("mxfp4", 1 / 2 + 1 / 32), ("bf16", 2))
def test_a_layer_is_as_large_as_its_weights(format_name: str, bytes_of_weight: float) -> None:
    assert groups()[0].case.expert_bytes(format_name) == 3 * 2880 * 2880 * bytes_of_weight
