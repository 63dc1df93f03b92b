"""OpenTelemetry spans of answers (`--otlp-endpoint`), sent as OTLP over HTTP. Imported only if that is set.

    llm_request        from the request's head to the end of its answer; a child of the caller's span, if it names one
    ├── prepare        reading the body, chat template, token ids
    ├── queue          at the engine, until the first step that takes it
    ├── prefill        from then to the first token
    ├── decode         from the first token to the last
    └── detokenize     from the first token until all text is written; `moe_serve.busy_seconds` of it took work

Attributes are those of the GenAI conventions and those that vLLM adds to them: numbers and names, never text. A span is
made when its answer has ended, so an answer costs a few microseconds. The SDK's own variables (OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...) hold.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import ParamSpec, TypeVar
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

from engine.version import service_version
from server.answer_watch import AnswerWatch
from server.renderers import Renderer
from server.request_log import INTERNAL

_TIMEOUT_S = 3  # of one delivery; a service that ends waits no longer for its collector
_FULL_PATH = "/v1/traces"
_NS = 1_000_000_000

Args = ParamSpec("Args")
Result = TypeVar("Result")


def trace_maker(endpoint: str) -> "Callable[[Headers, str], Trace]":
    """Makes the trace of a request from its headers and its id.

    Spans go to the collector at `endpoint` from a thread of their own; what is left at exit is sent then.
    """
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _FULL_PATH
    from_variables = OTELResourceDetector().detect()
    attributes: dict[str, AttributeValue] = {
        "service.name": "moe-serve",
        "service.version": service_version(),
        "service.instance.id": str(uuid.uuid4()),
        "process.pid": os.getpid(),
    }
    provider = TracerProvider(resource=Resource.create().merge(Resource(attributes)).merge(from_variables))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S)))
    return partial(Trace, provider.get_tracer("moe-serve", service_version()))


class Trace:
    """The spans of one HTTP request, made by `end`; none if it never came to `begin`."""

    def __init__(self, tracer: Tracer, headers: Headers, request_id: str) -> None:
        self._tracer = tracer
        self._headers = headers
        self._request_id = request_id
        self._start_ns = time.time_ns()
        self._start_s = time.monotonic()
        self._route: str | None = None
        self._answer: tuple[Renderer, AnswerWatch] | None = None
        self._busy_s = 0.0

    def begin(self, route: str) -> None:
        """The request is one to generate, at this route."""
        self._route = route

    def follow(self, renderer: Renderer, watch: AnswerWatch) -> None:
        """The request goes to the engine."""
        self._answer = renderer, watch

    def timed(self, work: Callable[Args, Result]) -> Callable[Args, Result]:
        """The same function; the time that it takes counts as detokenizing."""

        def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            start_s = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._busy_s += time.perf_counter() - start_s

        return run

    def end(self, status: int) -> None:
        """Make the spans. `status` is that of the HTTP response, 0 if it never began."""
        if self._route is None:
            return
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(dict(self._headers)),
            kind=SpanKind.SERVER,
            start_time=self._start_ns,
            attributes={
                "gen_ai.operation.name": "text_completion" if self._route == "/v1/completions" else "chat",
                "gen_ai.provider.name": "moe-serve",
                "gen_ai.request.id": self._request_id,
                "http.route": self._route,
                "http.response.status_code": status,
            },
        )
        if span.is_recording():
            self._describe(span, status)
        span.end(self._epoch_ns(time.monotonic()))

    def _describe(self, span: Span, status: int) -> None:
        error = None if status < 400 else f"error {status}"
        if self._answer is not None:
            renderer, watch = self._answer
            span.set_attributes(_attributes(renderer, watch))
            self._make_phases(span, watch)
            error = watch.failure or error
        if error is not None:
            span.set_attribute("error.type", error.removeprefix("error "))
        if error is not None and (error == INTERNAL or error.startswith("error 5")):
            span.set_status(Status(StatusCode.ERROR))

    def _make_phases(self, span: Span, watch: AnswerWatch) -> None:
        """The children, as far as the answer came."""
        begun_s = watch.start_s
        self._child(span, "prepare", self._start_s, begun_s)
        if watch.first_token_s is None:
            return
        first_s = begun_s + watch.first_token_s
        admitted_s = begun_s + watch.queue_s
        self._child(span, "queue", begun_s, admitted_s)
        self._child(span, "prefill", admitted_s, admitted_s + watch.prefill_s)
        self._child(span, "decode", first_s, watch.last_s)
        self._child(span, "detokenize", first_s, time.monotonic(), {"moe_serve.busy_seconds": self._busy_s})

    def _child(
        self, parent: Span, name: str, start_s: float, end_s: float, attributes: Mapping[str, float] | None = None
    ) -> None:
        """A span between two times of the monotonic clock."""
        context = set_span_in_context(parent)
        child = self._tracer.start_span(name, context, attributes=attributes, start_time=self._epoch_ns(start_s))
        child.end(self._epoch_ns(end_s))

    def _epoch_ns(self, monotonic_s: float) -> int:
        return self._start_ns + int((monotonic_s - self._start_s) * _NS)


def _attributes(renderer: Renderer, watch: AnswerWatch) -> dict[str, AttributeValue]:
    """What was asked and what came: GenAI conventions first, then what vLLM adds."""
    first, counts = renderer.prepared.requests[0], renderer.counts
    sampling = first.sampling
    decode_s = watch.last_s - watch.start_s - (watch.first_token_s or 0.0)
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": renderer.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": len(renderer.choices),
        "gen_ai.response.id": first.request_id.rpartition("-")[0],
        "gen_ai.response.model": renderer.model,
        "gen_ai.response.finish_reasons": [str(choice.finish_reason) for choice in renderer.choices],
        "gen_ai.usage.input_tokens": counts.num_prompt,
        "gen_ai.usage.output_tokens": counts.num_completion,
        "gen_ai.usage.cache_read.input_tokens": counts.num_cached,
        "gen_ai.request.n": len(renderer.choices),
        "gen_ai.usage.num_sequences": len(renderer.choices),
        "gen_ai.usage.prompt_tokens": counts.num_prompt,
        "gen_ai.usage.completion_tokens": counts.num_completion,
        "gen_ai.latency.e2e": watch.elapsed_s,
    }
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    if watch.first_token_s is not None:
        attributes |= {
            "gen_ai.latency.time_to_first_token": watch.first_token_s,
            "gen_ai.latency.time_in_queue": watch.queue_s,
            "gen_ai.latency.time_in_model_prefill": watch.prefill_s,
            "gen_ai.latency.time_in_model_decode": decode_s,
            "gen_ai.latency.time_in_model_inference": watch.prefill_s + decode_s,
        }
    return attributes
