"""How many pages requests need with sliding layers, and what the KV tensors look like. From configs alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.kv_cache import GIB, KvLayout, choose_cpu_pages
from engine.load import load_engine
from engine.model_settings import make_kv_layout, make_model_settings, max_step_tokens
from engine.page_needs import PageNeeds
from model.batch import KvLayerSpec
from model.sizes import measure_model
from moe.device import Device
from tests.engine.test_memory_plan import GPT_OSS_20B, make_folder
from tests.engine.windowed import WindowedModel

FULL = KvLayerSpec(num_heads=8, key_dim=64, value_dim=64)
SLIDING = KvLayerSpec(num_heads=8, key_dim=64, value_dim=64, window=128)
WIDE = KvLayerSpec(num_heads=8, key_dim=128, value_dim=64, window=128)
CPU = torch.device("cpu")


def test_gpt_oss_fits_at_least_1_7_times_the_tokens_of_uniform_pages(tmp_path):
    """60 GiB of KV cache at the default settings; "uniform" is every page in every layer."""
    config = EngineConfig(model=make_folder(tmp_path, GPT_OSS_20B), load_format="dummy")
    device = torch.device("cuda")
    sizes = measure_model(config.model, make_model_settings(config, device), Device(arch="sm90"))
    layout = make_kv_layout(config, sizes.kv_specs, sizes.dtype)
    assert layout == KvLayout(specs=(SLIDING, FULL) * 12, page_size=16, dtype=torch.bfloat16)
    num_pages = 60 * GIB // layout.bytes_per_page
    uniform_tokens = 60 * GIB // layout.bytes_per_token
    needs = layout.needs(max_step_tokens(config, device))
    assert needs.longest(num_pages) > 1.98 * uniform_tokens, "one request"
    windows = config.max_num_seqs * (needs.while_decoding(1024) - needs.count(1024))
    shared = num_pages - windows - needs.count(needs.lookahead)
    assert shared * 16 > 1.97 * uniform_tokens, "a request in every place, and two prompts of a whole step"
    for length, least in ((1024, 1.7), (4096, 1.9), (131072, 1.85)):
        assert num_pages // needs.while_decoding(length) > least * (uniform_tokens // length), "requests of one length"


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 9), st.integers(2, 60))
def test_the_longest_request_is_the_longest_that_fits(page_size, window, step_tokens, num_pages):
    needs = PageNeeds(page_size=page_size, window=window, step_tokens=step_tokens)
    longest = needs.longest(num_pages)
    assert needs.at_most(longest) <= num_pages < needs.at_most(longest + 1)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 30), st.integers(1, 9), st.integers(1, 9))
def test_two_steps_in_flight_hold_no_more_than_at_most(page_size, window, start, first, second):
    needs = PageNeeds(page_size=page_size, window=window, step_tokens=max(first, second))
    end = start + first + second
    visible = {position // page_size for position in range(max(0, start - window + 1), end)}
    assert needs.first_visible(start) == min(visible)
    assert needs.count(end) + len(visible) <= needs.at_most(end)


@pytest.mark.parametrize("specs", [(FULL, FULL), (SLIDING, SLIDING), (FULL, WIDE)], ids=["full", "sliding", "unlike"])
def test_layers_that_cannot_share_tensors_keep_every_page(specs):
    layout = KvLayout(specs=specs, page_size=16, dtype=torch.float32)
    assert (layout.window, layout.num_kinds) == (None, 1)
    assert layout.bytes_per_page == 16 * layout.bytes_per_token
    assert len({layer.keys.data_ptr() for layer in layout.allocate(1, CPU)}) == 2
    needs = layout.needs(64)
    assert (needs.longest(7), needs.at_most(112), needs.while_decoding(112), needs.num_kinds) == (112, 7, 7, 1)


def test_a_full_and_a_sliding_layer_share_a_tensor():
    """The first of each kind, the second of each kind, and a third sliding one alone."""
    layout = KvLayout(specs=(SLIDING, FULL, FULL, SLIDING, SLIDING), page_size=2, dtype=torch.float32)
    assert (layout.window, layout.bytes_per_page) == (128, 3 * 2 * 8 * 128 * 4)
    assert layout.bytes_per_token == 5 * 8 * 128 * 4
    a, b, c, d, e = (layer.keys.data_ptr() for layer in layout.allocate(3, CPU))
    assert (a == b, c == d, len({a, c, e})) == (True, True, 3)


@pytest.mark.parametrize(("num_pages", "max_model_len"), [(1, 16), (3, 48), (10, 160), (13, 256)])
def test_num_pages_counts_for_both_kinds_and_max_model_len_reckons_with_windows(num_pages, max_model_len):
    """Steps of 64 tokens and a window of 9: at most ten sliding pages."""
    config = EngineConfig(
        model=Path("unused"), device="cpu", num_pages=num_pages, max_num_batched_tokens=64, page_size=16
    )
    loaded = load_engine(config, WindowedModel(window=9, max_model_len=256))
    assert (loaded.num_pages, loaded.max_model_len) == (2 * num_pages, max_model_len)
    assert loaded.make_info(config, load_seconds=0.0).num_kv_tokens == max(num_pages, 2 * num_pages - 10) * 16


def test_a_cpu_cache_serves_all_places_and_one_full_request_always():
    layout = KvLayout(specs=(SLIDING, FULL), page_size=16, dtype=torch.float32)
    few = choose_cpu_pages(layout, max_num_seqs=4, max_model_len=1600, step_tokens=32)
    assert few == 4 * (100 + 9)
    assert choose_cpu_pages(layout, max_num_seqs=1, max_model_len=16000, step_tokens=32) == 1000 + 13
