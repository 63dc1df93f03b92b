"""Ranges of requests and of settings: the error names field, value and rule."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import EngineConfigError, RequestError
from engine.validate import RequestLimits, check_request
from tests.engine.requests import request
from tests.tables import rows

LIMITS = RequestLimits(vocab_size=100, max_model_len=50, num_kv_tokens=40)
NAN, INF = float("nan"), float("inf")


@rows(
    "field, value",
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("top_k", -1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", NAN),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("logprobs", -1),
    ("logprobs", 101),
    ("prompt_logprobs", -1),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: NAN}),
    ("logit_bias", {100: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("stop_token_ids", (100,)),
    ("stop_token_ids", (-1,)),
)
def test_a_value_out_of_range_names_its_field(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        check_request(request("a", [1], 8, **{field: value}), LIMITS)
    assert caught.value.param == field


@rows(
    "field, value",
    ("temperature", 0.0),
    ("temperature", 2.0),
    ("top_p", 1.0),
    ("top_k", 0),
    ("top_k", 5000),
    ("min_p", 1.0),
    ("presence_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("repetition_penalty", 0.5),
    ("min_tokens", 8),
    ("seed", -1),
    ("seed", 2**63 - 1),
    ("logprobs", 0),
    ("logprobs", 100),
    ("logit_bias", {99: -100.0}),
    ("stop_token_ids", (99, 0)),
)
def test_a_value_at_the_edge_is_taken(field, value):
    check_request(request("a", [1], 8, **{field: value}), LIMITS)


@rows(
    "prompt, max_tokens, param, numbers",
    ([], 8, "prompt", []),
    ([1, 100], 8, "prompt", ["100", "99"]),
    ([-1], 8, "prompt", ["-1"]),
    ([1] * 50, 1, "prompt", ["50"]),
    ([1], 0, "max_tokens", ["0"]),
    ([1] * 20, 31, "max_tokens", ["31", "20", "51", "50", "30"]),
    ([1] * 20, 22, "max_tokens", ["41", "40"]),
)
def test_a_request_that_cannot_be_served_is_refused_with_its_numbers(prompt, max_tokens, param, numbers):
    with pytest.raises(RequestError) as caught:
        check_request(request("a", prompt, max_tokens), LIMITS)
    assert caught.value.param == param
    assert all(number in str(caught.value) for number in numbers)


def test_a_request_that_just_fits_is_taken():
    check_request(request("a", [1] * 20, 21), LIMITS)
    check_request(request("a", [1] * 49, 1), RequestLimits(vocab_size=2, max_model_len=50, num_kv_tokens=50))


@rows(
    "field, value",
    ("dtype", "float8"),
    ("device", "tpu"),
    ("device", "cuda:x"),
    ("page_size", 0),
    ("num_pages", 0),
    ("max_num_seqs", 0),
    ("max_model_len", 0),
    ("max_num_batched_tokens", 63),
    ("max_queued_requests", -1),
    ("gpu_memory_utilization", 0.0),
    ("gpu_memory_utilization", 1.1),
    ("selfcheck", "maybe"),
    ("num_threads", 0),
    ("kv_cache_dtype", "fp4"),
    ("attention_backend", "flash"),
    ("load_format", "gguf"),
    ("router_logits_dtype", "int8"),
)
def test_a_wrong_setting_names_field_and_value(field, value):
    with pytest.raises(EngineConfigError, match=f"{field} is .*{value}"):
        EngineConfig(model=Path("m"), **{field: value})


def test_defaults_are_valid():
    config = EngineConfig(model=Path("m"))
    assert config.max_requests == config.max_num_seqs + config.max_queued_requests
