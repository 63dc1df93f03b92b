"""`AnswerWatch`: measures one answer as its outputs come: time to the first token, between tokens, in the engine."""

import time
from collections.abc import Callable

from server.metrics import Metrics
from server.renderers import Renderer
from server.request_group import News
from server.schema.common import Timings


class AnswerWatch:
    """Times of one answer, from its making. `on_tokens` costs one observation a step, whatever the number of choices.

    `on_token` costs less: its gaps are observed together with those of other answers, a second late at most. Leaving
    `with watch:` observes what is left.

    Attributes:
        start_s, last_s: times of its making and of the last output, by the clock.
        first_token_s: seconds to the first token; None before it.
        token_ids: the generated ids of each choice, if they are kept; else empty.
        queue_s, prefill_s: the longest that one of its requests waited at the engine, and then took to its first token.
        failure: why it ended without a finish reason, in the words of the request log.
    """

    __slots__ = (
        "_clock", "_gaps", "_keeps_tokens", "_metrics", "_renderer",
        "failure", "first_token_s", "last_s", "prefill_s", "queue_s", "start_s", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        metrics: Metrics,
        renderer: Renderer,
        clock: Callable[[], float] = time.monotonic,
        *,
        keeps_tokens: bool = False,
    ) -> None:
        self._metrics = metrics
        self._renderer = renderer
        self._clock = clock
        self.start_s = self.last_s = clock()
        self._gaps = metrics.inter_token_seconds.together(renderer.model, clock)
        self._keeps_tokens = keeps_tokens
        self.token_ids: list[list[int]] = [[] for _ in renderer.choices]
        self.first_token_s: float | None = None
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self.failure: str | None = None

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, *_exc: object) -> None:
        """Observe what is left, however the answer ends."""
        self._gaps.observe()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self.start_s

    @property
    def silence_s(self) -> float:
        """Seconds since the last token, or since the start."""
        return self._clock() - self.last_s

    def timings(self) -> Timings:
        """Where the time of the answer went so far."""
        first_s = self.first_token_s or 0.0
        times_s = (self.queue_s, self.prefill_s, first_s, self.last_s - self.start_s - first_s, self.elapsed_s)
        queue, prefill, first, decode, total = (round(1000 * each_s, 3) for each_s in times_s)
        return {
            "queue_ms": queue, "prefill_ms": prefill, "first_token_ms": first, "decode_ms": decode, "total_ms": total,
        }  # fmt: skip

    def on_news(self, news: News) -> None:
        """Outputs have come, of one step or, if the reader was slow, of several."""
        model = self._renderer.model
        for _, output in news:
            if output.queue_s is not None and output.prefill_s is not None:
                self.queue_s = max(self.queue_s, output.queue_s)
                self.prefill_s = max(self.prefill_s, output.prefill_s)
                self._metrics.queue_seconds.observe(model, value=output.queue_s)
                self._metrics.prefill_seconds.observe(model, value=output.prefill_s)
        self.on_tokens(news)

    def on_token(self, token_id: int, now_s: float) -> None:
        """A token has come, at this time, for an answer of one choice that has begun."""
        gaps = self._gaps
        gaps.values.append(now_s - self.last_s)
        self.last_s = now_s
        if now_s > gaps.due_s:
            gaps.observe()
        if self._keeps_tokens:
            self.token_ids[0].append(token_id)

    def on_tokens(self, news: News) -> None:
        """Tokens have come. Several steps that come at once share the time since the last ones evenly."""
        num_tokens = sum([len(output.token_ids) for _, output in news])
        if self._keeps_tokens:
            for index, output in news:
                self.token_ids[index] += output.token_ids
        now_s = self._clock()
        if self.first_token_s is None:
            self.first_token_s = now_s - self.start_s
            self._metrics.first_token_seconds.observe(self._renderer.model, value=self.first_token_s)
        elif num_tokens:
            num_steps = -(-num_tokens // len(self._renderer.choices))
            value = (now_s - self.last_s) / num_steps
            self._metrics.inter_token_seconds.observe(self._renderer.model, value=value, count=num_tokens)
        self.last_s = now_s

    def on_end(self) -> None:
        """The answer is complete."""
        metrics, model, counts = self._metrics, self._renderer.model, self._renderer.counts
        first_s = self.start_s + (self.first_token_s or 0.0)
        decode_s = self.last_s - first_s
        num_steps = counts.num_completion / len(self._renderer.choices) - 1
        metrics.request_seconds.observe(model, value=self.elapsed_s)
        metrics.decode_seconds.observe(model, value=decode_s)
        metrics.inference_seconds.observe(model, value=self.prefill_s + decode_s)
        if num_steps > 0:
            metrics.seconds_per_token.observe(model, value=decode_s / num_steps)
        metrics.request_prompt_tokens.observe(model, value=counts.num_prompt)
        metrics.request_generated_tokens.observe(model, value=counts.num_completion)
        for request in self._renderer.prepared.requests:
            metrics.request_max_tokens.observe(model, value=request.sampling.max_tokens)
        metrics.prompt_tokens.inc(model, by=counts.num_prompt)
        metrics.completion_tokens.inc(model, by=counts.num_completion)
        for choice in self._renderer.choices:
            metrics.finished.inc(model, str(choice.finish_reason))
            metrics.undeclared_calls.inc(model, by=choice.num_undeclared_calls)
            if choice.is_empty:
                metrics.empty_answers.inc(model, str(choice.finish_reason))
