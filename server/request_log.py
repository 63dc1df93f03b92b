"""`RequestLog`: a log line for every request that the engine got (`--log-requests`), or for slow ones only.

Lengths and times are logged. Text of prompts and answers is logged only if `--log-requests text` asks for it.
"""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect

from engine.logs import FIELDS
from server.answer_watch import AnswerWatch
from server.config import ServerConfig
from server.convert import Tokenizer
from server.errors import ApiError
from server.renderers import Renderer

log = logging.getLogger(__name__)

INTERNAL, _LEFT = "internal error", "client left"


class RequestLog:
    """Knows which requests are logged, and how much of them."""

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer) -> None:
        self._logs_all = config.log_requests != "off"
        self.keeps_text = config.log_requests == "text"
        self._slow_s = config.slow_request_seconds
        self._tokenizer = tokenizer

    @contextmanager
    def around(self, request_id: str, renderer: Renderer, watch: AnswerWatch) -> Iterator[None]:
        """Log the answer that is made inside, whether it is finished, fails, or its client leaves; `watch` is told."""
        outcome: str | None = None
        watch.failure = INTERNAL
        try:
            yield
            outcome = ", ".join(str(choice.finish_reason) for choice in renderer.choices)
            watch.failure = None
        except ApiError as error:
            watch.failure = f"error {error.status}"
            raise
        except (asyncio.CancelledError, ClientDisconnect):
            watch.failure = _LEFT
            raise
        finally:
            self._write(request_id, renderer, watch, watch.failure or outcome)

    def _write(self, request_id: str, renderer: Renderer, watch: AnswerWatch, outcome: str | None) -> None:
        is_slow = self._slow_s is not None and watch.elapsed_s >= self._slow_s
        if not self._logs_all and not is_slow:
            return
        counts = renderer.counts
        fields: dict[str, Any] = {
            "request_id": request_id,
            "engine_id": renderer.prepared.requests[0].request_id,
            "model": renderer.model,
            "outcome": outcome,
            "prompt_tokens": counts.num_prompt,
            "cached_tokens": counts.num_cached,
            "generated_tokens": counts.num_completion,
            "seconds": round(watch.elapsed_s, 4),
            "queue_seconds": round(watch.queue_s, 4),
            "prefill_seconds": round(watch.prefill_s, 4),
            "first_token_seconds": None if watch.first_token_s is None else round(watch.first_token_s, 4),
        }
        if self.keeps_text:
            fields["prompts"] = [self._text(each.prompt_ids) for each in renderer.prepared.requests]
            fields["answers"] = [self._text(ids) for ids in watch.token_ids]
        words = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
        level, kind = (logging.WARNING, "slow request") if is_slow else (logging.INFO, "request")
        log.log(level, "%s: %s", kind, words, extra={FIELDS: fields})

    def _text(self, ids: list[int]) -> str:
        """Text of ids, control tokens included."""
        return b"".join(map(self._tokenizer.token_bytes, ids)).decode(errors="replace")
