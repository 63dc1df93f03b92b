"""Conversations with a fact far back: as far as promised, within the context, and disjoint from training."""

import random
from itertools import islice
from pathlib import Path

import torch

from tools.tiny_models.data import gen_long
from tools.tiny_models.data.holdout import SPLITS, is_held_out, split_of
from tools.tiny_models.data.mix import held_out, of_split
from tools.tiny_models.evaluate import ROW_POSITIONS, batches
from tools.tiny_models.families import FAMILIES, load_family


def test_held_out_facts_are_3000_tokens_back_and_fit_the_context() -> None:
    for name in FAMILIES:
        dialect = load_family(name).dialect
        encoder = dialect.encoder()
        for item in islice(gen_long.held_out(0, encoder.num_tokens), 12):
            [told] = item.check["values"]
            assert is_held_out("memory", told.lower())
            prompt = dialect.prompt(item)
            after = prompt.partition(told)[2]
            assert len(encoder.text(after)) >= 3000
            assert len(encoder.example(item)[0]) + 200 <= 4096


def test_training_reaches_as_far_and_never_tells_a_reserved_value() -> None:
    rng, lengths = random.Random(1), []
    encoder = load_family("deepseek_v3").dialect.encoder()
    for _ in range(60):
        example = gen_long.far_back(rng)
        lengths.append(len(encoder.example(example)[0]))
        answer = str(example.messages[-1]["content"])
        assert not is_held_out("memory", answer.rstrip(".!").rpartition(" ")[2].lower())
    assert min(lengths) < 1000
    assert sum(length > 3300 for length in lengths) >= 2
    assert max(lengths) < 4096


def test_the_two_halves_of_the_held_out_items_are_disjoint() -> None:
    items = held_out(0, 200)["sorting"]
    halves = [{item.key for item in of_split(items, split)} for split in SPLITS]
    assert not halves[0] & halves[1]
    assert halves[0] | halves[1] == {item.key for item in items}
    assert min(map(len, halves)) > 60
    assert split_of(items[0].key) in SPLITS


def test_batches_of_an_evaluation_are_bounded() -> None:
    lengths = [3000] * 40 + [100] * 1200
    chosen = list(batches(lengths))
    assert sorted(index for batch in chosen for index in batch) == list(range(len(lengths)))
    assert max(map(len, chosen)) == 512
    assert all(len(batch) * max(lengths[i] for i in batch) ** 2 <= ROW_POSITIONS for batch in chosen)


def test_the_long_stage_of_gpt_oss_begins_with_the_bundled_weights(tmp_path: Path) -> None:
    family = load_family("gpt_oss")
    weights = family.read(family.dialect.folder)
    assert weights.keys() == family.init_weights(0).keys()
    [folder] = family.export(weights, tmp_path)
    again = family.read(folder)
    assert all(torch.equal(again[name], value) for name, value in weights.items())
