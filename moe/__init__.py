"""Mixture-of-experts core: one `MoeRunner` for every format, kernel and transport. Importing it needs torch alone."""

from moe.config import Activation, MoeA2ABackend, MoeBackend, MoeRunnerConfig, RoutingConfig, RoutingMethod
from moe.errors import MoeConfigError, MoeError, SelfCheckError, UnsupportedPathError, WeightFormatError
from moe.geometry import ExpertShape, RankPlace
from moe.routing import BypassedTopK, StandardTopK
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.types import StandardCombineInput, StandardDispatchOutput

__all__ = [
    "Activation",
    "BypassedTopK",
    "ExpertShape",
    "MoeA2ABackend",
    "MoeBackend",
    "MoeConfigError",
    "MoeError",
    "MoeRunner",
    "MoeRunnerConfig",
    "RankPlace",
    "RoutingConfig",
    "RoutingMethod",
    "SelfCheckError",
    "StandardCombineInput",
    "StandardDispatchOutput",
    "StandardTopK",
    "Topology",
    "UnsupportedPathError",
    "WeightFormatError",
]
