"""What hosts must have in common: every setting but a few, the version, and the files of the model."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.rank_terms import _OF_EACH_HOST, Terms, terms_of

CONFIG = EngineConfig(
    model=Path("m"), tensor_parallel_size=2, nnodes=2, master_addr="a", enable_eplb=True, expert_parallel_size=2
)
FIRST = Terms(version="1.0", settings={"page_size": 16, "seed": None}, files={"config.json": "aa", "x": "bb"})


def test_every_setting_counts_but_those_of_a_host():
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names >= _OF_EACH_HOST
    assert set(terms_of(CONFIG).settings) == names - _OF_EACH_HOST


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, None),
        ({"settings": {"seed": 3}}, "seed is 3 on host 1 and not set on host 0: it must be the same on all hosts"),
        (
            {"settings": {"page_size": 32}},
            "page_size is 32 on host 1 and 16 on host 0: it must be the same on all hosts",
        ),
        ({"settings": {"new": True}}, "new is True on host 1 and not set on host 0: it must be the same on all hosts"),
        (
            {"version": "2.0", "settings": {"page_size": 32}},
            "moe-serve is of version 2.0 on host 1 and 1.0 on host 0: install the same on all hosts",
        ),
        (
            {"files": {"x": "cc"}},
            "x is not the same file on host 1 as on host 0: bring the same revision of the model to all hosts",
        ),
    ],
)
def test_the_first_difference_is_named(changes, difference):
    merged = {
        name: getattr(FIRST, name) | value if isinstance(value, dict) else value for name, value in changes.items()
    }
    assert msgspec.structs.replace(FIRST, **merged).difference(FIRST, 1) == difference


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"node_rank": 1, "master_addr": "b", "base_gpu_id": 3, "num_threads": 2, "log_format": "json"}, None),
        ({"profile_dir": Path("p"), "tune_cache_dir": Path("q"), "model": Path("n")}, None),
        ({"page_size": 32}, "page_size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size"),
    ],
)
def test_terms_of_two_hosts(changes, name):
    difference = terms_of(dataclasses.replace(CONFIG, **changes)).difference(terms_of(CONFIG), 1)
    assert difference is None if name is None else difference.startswith(f"{name} is ")


def test_the_load_for_eplb_counts_by_its_content(tmp_path):
    files = [tmp_path / name for name in "abc"]
    for file, text in zip(files, "xxy", strict=True):
        file.write_text(text)
    first, same, other = (terms_of(dataclasses.replace(CONFIG, eplb_load=file)) for file in files)
    assert same.difference(first, 1) is None
    assert other.difference(first, 1).startswith("the file of eplb_load is not the same file on host 1")
