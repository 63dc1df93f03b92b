"""Asks the server, before the run, which model it serves and what it accepts. Measures nothing."""

import json
import random
from typing import Any

import orjson

from server.bench.config import LOWEST_TOKEN_ID, BenchConfig
from server.bench.connection import Pool
from server.bench.errors import BenchError, RequestFailed
from server.bench.events import AnswerReader, error_text
from server.bench.workload import PATHS, Accepted, as_prompt, random_text, request_fields
from server.tls import HTTPS_HINT

_STREAM_OPTIONS: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)
_REFUSED = (400, 422)
_FEW_WORDS, _MANY_WORDS = 32, 160  # of the two prompts that show how many tokens a word has


async def probe(config: BenchConfig) -> Accepted:
    """What the server accepts.

    Raises:
        BenchError: it cannot be reached, lists no model, or refuses even the plainest request.
    """
    pool = Pool(config.target, config.timeout_s)
    try:
        model = config.model or await _first_model(config, pool)
        return await _accepted(config, pool, model)
    except RequestFailed as error:
        target = config.target
        may_be_https = error.kind == "disconnected" and target.scheme == "http"
        hint = HTTPS_HINT if may_be_https else ""
        raise BenchError(f"--base-url: {target.scheme}://{target.host}:{target.port}: {error}{hint}") from error
    finally:
        pool.close()


async def _accepted(config: BenchConfig, pool: Pool, model: str) -> Accepted:
    prompts: list[dict[str, Any]] = [as_prompt(config.endpoint, random_text(random.Random(0), 8))]
    if config.endpoint == "completions" and config.dataset is None:
        prompts.insert(0, {"prompt": [LOWEST_TOKEN_ID, config.vocab_size - 1]})
    version = await _version(config, pool)
    refusal = ""
    for prompt in prompts:
        for options in _STREAM_OPTIONS:
            status, _, refusal = await _ask(config, pool, request_fields(config, model, options) | prompt)
            if status == 200:
                takes_ids = isinstance(prompt.get("prompt"), list)
                accepted = Accepted(model=model, stream_options=options, takes_ids=takes_ids, server_version=version)
                return accepted if takes_ids or config.dataset else await _calibrated(config, pool, accepted)
            if status not in _REFUSED:
                raise BenchError(f"the server answers HTTP {status}: {refusal}")
    raise BenchError(f"the server refuses every kind of request: {refusal}")


async def _calibrated(config: BenchConfig, pool: Pool, accepted: Accepted) -> Accepted:
    """With the words per token as the server counts them, where it does."""
    counts = []
    for num_words in (_FEW_WORDS, _MANY_WORDS):
        prompt = as_prompt(config.endpoint, random_text(random.Random(num_words), num_words))
        fields = request_fields(config, accepted.model, accepted.stream_options)
        _, num_tokens, _ = await _ask(config, pool, fields | prompt)
        counts.append(num_tokens)
    few, many = counts
    if few is None or many is None or many <= few:
        return accepted
    words_per_token = (_MANY_WORDS - _FEW_WORDS) / (many - few)
    return Accepted(
        model=accepted.model,
        stream_options=accepted.stream_options,
        takes_ids=False,
        words_per_token=words_per_token,
        extra_words=few * words_per_token - _FEW_WORDS,
        server_version=accepted.server_version,
    )


async def _ask(config: BenchConfig, pool: Pool, fields: dict[str, Any]) -> tuple[int, int | None, str]:
    """Ask for one token with `fields` and those of `--extra-body`, but no more tokens than that.

    Returns status, prompt tokens if the server counts them, and the message of an error.
    """
    wanted = {**fields, **config.extra_body, "max_tokens": 1}
    wanted.pop("min_tokens", None)
    path = config.target.path + PATHS[config.endpoint]
    reader = AnswerReader()
    status, body = await pool.exchange(config.target.request("POST", path, orjson.dumps(wanted)), reader.feed)
    return status, reader.prompt_tokens, error_text(body)


async def _first_model(config: BenchConfig, pool: Pool) -> str:
    status, body = await _get(config, pool, f"{config.target.path}/models")
    if status != 200:
        raise BenchError(f"GET {config.target.path}/models answers HTTP {status}: {error_text(body)}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"GET {config.target.path}/models lists no model: name one with --model") from None


async def _version(config: BenchConfig, pool: Pool) -> str | None:
    """What /version says; vLLM and moe-serve have it."""
    try:
        status, body = await _get(config, pool, f"{config.target.path.removesuffix('/v1')}/version")
        found = json.loads(body) if status == 200 else {}
    except (RequestFailed, ValueError):
        return None
    return str(found["version"]) if isinstance(found, dict) and "version" in found else None


async def _get(config: BenchConfig, pool: Pool, path: str) -> tuple[int, bytes]:
    parts: list[bytes] = []
    status, body = await pool.exchange(config.target.request("GET", path), lambda data, _now_s: parts.append(data))
    return status, b"".join(parts) or body
