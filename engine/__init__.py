"""Requests to tokens: scheduler, paged KV, sampling, and the process that runs the step loop.

These names need no torch; `engine.core.EngineCore` runs the same engine in the caller's process.
"""

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineConfigError, EngineError, RequestError
from engine.types import EngineInfo, EngineOutput, EngineRequest, EngineStats, SamplingParams, TokenLogprobs

__all__ = [
    "EngineClient",
    "EngineConfig",
    "EngineConfigError",
    "EngineError",
    "EngineInfo",
    "EngineOutput",
    "EngineRequest",
    "EngineStats",
    "RequestError",
    "SamplingParams",
    "TokenLogprobs",
]
