"""A collector of OpenTelemetry spans that speaks OTLP over HTTP, on a port of its own."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.conftest import wait_until


@dataclass(frozen=True)
class CollectedSpan:
    """One span as it came over the wire; ids in hex, times in ns since the epoch."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    resource: dict[str, object]
    is_error: bool


@dataclass
class Collector:
    """What has come so far."""

    url: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def take(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = values_of(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [span_of(each, resource) for each in scope.spans]

    def forget(self) -> None:
        """Forget what came so far, for the next row of a table."""
        self.spans.clear()
        self.paths.clear()

    def roots(self, count: int) -> list[CollectedSpan]:
        """The spans of so many requests, once they have come."""
        wait_until(lambda: sum(each.name == "llm_request" for each in self.spans) >= count)
        return [each for each in self.spans if each.name == "llm_request"]

    def children(self, parent: CollectedSpan) -> dict[str, CollectedSpan]:
        return {each.name: each for each in self.spans if each.parent_id == parent.span_id}


def span_of(span, resource: dict[str, object]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=values_of(span.attributes),
        resource=resource,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def values_of(attributes) -> dict[str, object]:
    return {each.key: value_of(each.value) for each in attributes}


def value_of(value):
    kind = value.WhichOneof("value")
    return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.paths.add(self.path)
            collector.take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield collector
        server.shutdown()
        thread.join()
