"""From settings to MoE layers: first the path of every layer, then the weights, prepared and checked layer by layer."""

from collections.abc import Callable

import torch

from model.config import ModelSettings
from model.families.base import MoeParts, MoeShape
from model.moe_layer import Gate, MoeLayer
from moe import MoeRunner, MoeRunnerConfig, Topology
from moe.dispatch.standard import StandardDispatcher
from moe.formats import ExpertWeights
from moe.registry import load_backend
from moe.routing import TopK
from moe.select import choose_backend
from moe.selfcheck import check_layer


class MoeBuilder:
    """Builds the MoE layers of one model on one device."""

    def __init__(self, *, settings: ModelSettings, shape: MoeShape, hidden_size: int) -> None:
        self.settings = settings
        self.shape = shape
        self.topology = Topology(device=settings.device)
        self.config = MoeRunnerConfig(
            num_experts=shape.num_experts,
            num_local_experts=shape.num_experts,
            hidden_size=hidden_size,
            intermediate_size=shape.intermediate_size,
            top_k=shape.routing.top_k,
            activation=shape.activation,
            dtype=settings.model_dtype,
            routing=shape.routing,
        )
        self._runners: dict[int, MoeRunner] = {}
        self._formats: dict[int, str] = {}

    def resolve(self, layer: int, format_name: str) -> None:
        """Choose a backend for a layer's format and build its runner; no weight is needed.

        Raises:
            UnsupportedPathError: (of moe) nothing serves the combination; the message says why and what would.
        """
        settings = self.settings
        backend = choose_backend(
            settings.moe_backend, settings.device, format_name, settings.moe_a2a_backend, self.config
        )
        self._runners[layer] = MoeRunner(backend, settings.moe_a2a_backend, self.config)
        self._formats[layer] = format_name

    def build(self, layer: int, parts: MoeParts, read_experts: Callable[[], ExpertWeights]) -> MoeLayer:
        """Read, prepare and check one layer's experts; the canonical weights are dropped on return.

        Raises:
            SelfCheckError: (of moe) the path computes something else than its reference.
        """
        runner = self._runners[layer]
        experts = _to_device(read_experts(), self.settings.device)
        backend = load_backend(runner.backend)
        quant_info = backend.prepare(experts, runner.config, self.topology)
        selfcheck = self.settings.selfcheck
        if selfcheck == "all" or (selfcheck == "first" and layer == min(self._runners)):
            check_layer(runner, quant_info, experts, layer=layer, topology=self.topology)
        return MoeLayer(
            gate=Gate(parts.gate_weight_EH, parts.gate_bias_E, self._logits_dtype(layer)),
            topk=TopK(self.shape.routing),
            routes_inside=backend.routes_inside,
            correction_bias_E=parts.correction_bias_E,
            dispatcher=StandardDispatcher(),
            runner=runner,
            quant_info=quant_info,
            shared_experts=parts.shared_experts,
            description=f"layer {layer}: {runner.backend} / {runner.a2a} / {self._formats[layer]}",
        )

    def _logits_dtype(self, layer: int) -> torch.dtype:
        requested = self.settings.router_logits_dtype
        if requested == "auto":
            dtype: torch.dtype = load_backend(self._runners[layer].backend).router_logits_dtype(self._formats[layer])
            return dtype
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[requested]


def _to_device(experts: ExpertWeights, device: torch.device) -> ExpertWeights:
    return ExpertWeights(
        w13=experts.w13.to(device),
        w2=experts.w2.to(device),
        b13=None if experts.b13 is None else experts.b13.to(device),
        b2=None if experts.b2 is None else experts.b2.to(device),
    )
