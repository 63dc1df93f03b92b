"""Renderers: how each endpoint writes an answer, as a stream of events or as one body folded from the same events."""

from server.renderers.base import Event, Renderer, TokenCounts
from server.renderers.chat import ChatRenderer
from server.renderers.completions import CompletionRenderer

__all__ = ["ChatRenderer", "CompletionRenderer", "Event", "Renderer", "TokenCounts"]
