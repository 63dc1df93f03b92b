"""From settings to MoE layers: first the path of every layer, then the weights, prepared and checked layer by layer."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loaders.phases import Phase, StartPhases
from model.balance import ExpertBalance, LayerExperts
from model.config import ModelSettings
from model.families.base import MoeParts
from model.moe_layer import Gate, MoeLayer, TokenSlices
from moe import MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, Topology
from moe.backend import Backend, DispatchContext
from moe.check.selfcheck import check_layer, run_cases
from moe.choose.select import choose_backend
from moe.config import DispatchDtype
from moe.device import arch_of
from moe.dispatch.base import Dispatcher
from moe.dispatch.round_trip import check_round_trip
from moe.dispatch.transport import DispatchSpec, Transport, build_transport, dispatch_formats
from moe.errors import MoeConfigError, UnsupportedPathError
from moe.formats import FORMATS, ExpertWeights
from moe.group import RankGroups
from moe.kernels.compile_ahead import compile_ahead
from moe.overlap import SideStream
from moe.placement import Placement
from moe.registry import BACKEND_MODULES, load_backend
from moe.replicas import NO_TABLES, ExpertTables
from moe.tune.layers import LayerTuner
from moe.types import MoeQuantInfo

_ALONE = RankGroups()


@dataclasses.dataclass(frozen=True, slots=True)
class _Path:
    """How one layer will run, known from headers alone."""

    runner: MoeRunner
    format_name: str


def rank_config(layer: MoeRunnerConfig, settings: ModelSettings, format_name: str) -> MoeRunnerConfig:
    """One rank's settings of a family's MoE layer whose experts have the given number format.

    Where experts have replicas, the layer has as many experts as there are slots, and routes to them outside.
    """
    if settings.balance.has_replicas:
        slots_per_rank = settings.balance.slots_per_rank(layer.num_experts, settings.layout)
        shape = dataclasses.replace(layer.shape, num_experts=slots_per_rank * settings.layout.ep_size)
        layer = dataclasses.replace(layer, shape=shape, routing=None)
    return dataclasses.replace(
        layer,
        place=settings.layout.moe_place,
        scale_block=FORMATS[format_name].col_block,
        dtype=settings.model_dtype,
        max_num_tokens=_max_expert_tokens(settings),
    )


def _max_expert_tokens(settings: ModelSettings) -> int:
    """Tokens that a rank's dispatcher or experts see at most: those of all ranks where they are gathered, and a rank's
    part of its own where a transport divides what several ranks have.
    """
    layout, num_tokens = settings.layout, settings.max_num_tokens
    if settings.moe_a2a_backend is MoeA2ABackend.NONE:
        return num_tokens * layout.dp_size
    return -(-num_tokens // layout.tp_size)


class MoeBuilder:
    """Builds the MoE layers of one model on one rank: `resolve` every layer, `connect`, then `build` every layer."""

    def __init__(
        self,
        *,
        settings: ModelSettings,
        layer: MoeRunnerConfig,
        groups: RankGroups = _ALONE,
        phases: StartPhases | None = None,
    ) -> None:
        """`layer` is what all MoE layers have in common; `groups` those of the rank that `settings.layout` names;
        `phases` the record of the start.

        Raises:
            MoeConfigError: (of moe) the ranks cannot share the experts; the message has the numbers.
        """
        if layer.routing is None:
            raise MoeConfigError("the MoE layers of a model need a routing")
        self._routing = layer.routing
        self.settings = settings
        self.layer = layer
        self.topology = Topology.at(settings.layout.moe_place, device=settings.device, a2a=settings.moe_a2a_backend)
        self._groups = groups
        self._phases = phases or StartPhases()
        self._backends: dict[str, MoeBackend] = {}  # chosen once for each number format
        self._compiled: set[str] = set()  # number formats whose kernels for the self-check are compiled
        self._paths: dict[int, _Path] = {}
        self._transport: Transport | None = None
        self._tuner = LayerTuner(settings.tuning, groups.whole)
        self._side = SideStream(settings.device)
        self.balance: ExpertBalance | None = None
        self._placements: dict[int, Placement] = {}  # by layer, once connected

    def resolve(self, layer: int, format_name: str) -> None:
        """Choose a backend for a layer's format and build its runner; no weight is needed.

        Raises:
            UnsupportedPathError: (of moe) nothing serves the combination; the message says why and what would.
        """
        settings, config = self.settings, rank_config(self.layer, self.settings, format_name)
        formats = dispatch_formats(settings.moe_a2a_backend, settings.deepep.mode)
        if format_name not in self._backends:
            self._backends[format_name] = choose_backend(
                settings.moe_backend, settings.device, format_name, settings.moe_a2a_backend, config, formats
            )
        backend = self._backends[format_name]
        check_backend(backend, settings, arch_of(settings.device))
        runner = MoeRunner(backend, settings.moe_a2a_backend, config, dispatch_formats=formats)
        self._paths[layer] = _Path(runner, format_name)

    def connect(self) -> None:
        """Build the transport that all layers share; errors as `build_transport` says. No weight is needed."""
        if not self._paths:
            return
        self._place_experts()
        paths = list(self._paths.values())
        self._transport = build_transport(
            self.topology,
            paths[0].runner.config,
            group=self._groups.world,
            tp=self._groups.tp,
            dp=self._groups.dp,
            settings=self.settings.deepep,
            dispatch_dtypes={self._dispatch_dtype(path) for path in paths},
            row_multiple=max(load_backend(path.runner.backend).row_multiple for path in paths),
        )

    def _place_experts(self) -> None:
        """Make the counters, and choose which experts this rank holds at first."""
        settings, num_experts = self.settings.balance, self.layer.num_experts
        if not settings.is_counting:
            return
        layout = self.settings.layout
        placements = settings.first_placements(len(self._paths), num_experts, layout)
        self.balance = ExpertBalance(len(self._paths), num_experts, layout, self.settings.device)
        self._placements = dict(zip(self._paths, placements, strict=True))

    def held_experts(self, layer: int) -> Sequence[int] | None:
        """The experts in this rank's slots of a layer; None for its part of all, in order."""
        if not self.settings.balance.has_replicas:
            return None
        return self._placements[layer].experts[self.topology.ep_rank]

    def _tables(self, layer: int, backend: Backend[Any], quant_info: MoeQuantInfo) -> ExpertTables:
        """What a layer counts with, and where its experts are; ranks with the same tokens count them once."""
        balance = self.balance
        if balance is None:
            return NO_TABLES
        placement = self._placements[layer]
        is_counting = self._slices() is not None or self._groups.tp.rank == 0
        tables = ExpertTables(
            load_E=balance.row(len(balance.layers), is_counting=is_counting),
            slots_CE=balance.table(placement) if self.settings.balance.has_replicas else None,
        )
        balance.layers.append(LayerExperts(layer, backend, quant_info, tables, placement))
        return tables

    def build(self, layer: int, parts: MoeParts, read_experts: Callable[[], ExpertWeights]) -> MoeLayer:
        """Read, prepare, tune and check one layer's experts; the canonical weights are dropped on return.

        `read_experts` gives them on the device.

        Raises:
            SelfCheckError: (of moe) the path computes something else than its reference.
            WeightFormatError: (of moe) the weights of an expert give NaN or infinity.
            MoeConfigError: (of moe) no tactic of the backend does.
        """
        path = self._paths[layer]
        runner, backend = path.runner, load_backend(path.runner.backend)
        experts = read_experts()
        scales = experts.layer_input_scales
        dispatch_dtype = self._dispatch_dtype(path, knows_input_scale=scales is not None)
        topology = dataclasses.replace(self.topology, dispatch_dtype=dispatch_dtype)
        quant_info = self._prepared(layer, experts, topology)
        wants = DispatchSpec(
            expert_alignment=backend.expert_alignment,
            dispatch_dtype=dispatch_dtype,
            input_scale=scales[0] if scales and dispatch_dtype is DispatchDtype.NVFP4 else None,
            quantize=backend.dispatch_quantizer(quant_info),
            signals=backend.signal_kind(arch_of(topology.device)) if self.settings.deepep.overlaps_down_gemm else None,
        )
        if wants.signals is not None:
            backend.check_signals(quant_info)
        dispatcher = self._connected().dispatcher(wants)
        report = None
        if layer in self._checked_layers:
            with self._phases.step_of(Phase.SELF_CHECK, len(self._checked_layers)):
                self._compile_check(path, quant_info, experts, topology)
                report = check_layer(runner, quant_info, experts, layer=layer, topology=topology)
                self._check_transport(dispatcher, runner, topology, wants)
        return MoeLayer(
            gate=Gate(parts.gate_weight_EH, parts.gate_bias_E, self._logits_dtype(path)),
            routing=self._routing,
            routes_inside=backend.routes_inside and self.balance is None,
            correction_bias_E=parts.correction_bias_E,
            dispatcher=dispatcher,
            runner=runner,
            quant_info=self._in_service(quant_info),
            shared_experts=parts.shared_experts,
            description=f"layer {layer}: {runner.backend} / {runner.a2a} / {path.format_name}",
            selfcheck=report,
            slices=self._slices(),
            tables=self._tables(layer, backend, quant_info),
            side=self._side if self._side.is_real else None,
            overlaps_down_gemm=wants.signals is not None,
        )

    def _compile_check(self, path: _Path, quant_info: MoeQuantInfo, experts: ExpertWeights, topology: Topology) -> None:
        """Before the first check of a number format: compile all its kernels at once. Other libraries bring theirs."""
        if path.runner.backend is MoeBackend.TRITON and path.format_name not in self._compiled:
            self._compiled.add(path.format_name)
            compile_ahead(
                f"self-check of {path.format_name}",
                lambda: run_cases(path.runner, quant_info, experts, topology),
                topology.device,
            )

    def _slices(self) -> TokenSlices | None:
        """For transports, where the ranks of a tensor-parallel group have the same tokens."""
        has_transport = self.topology.a2a is not MoeA2ABackend.NONE
        return TokenSlices(self._groups.tp) if has_transport and self._groups.tp.size > 1 else None

    def _prepared(self, layer: int, experts: ExpertWeights, topology: Topology) -> MoeQuantInfo:
        """The layer's quant info, with its tactics."""
        runner, settings, num_layers = self._paths[layer].runner, self.settings, len(self._paths)
        config = dataclasses.replace(runner.config, num_layers_left=sum(other >= layer for other in self._paths))
        with self._phases.step_of(Phase.PROCESSING, num_layers):
            quant_info = load_backend(runner.backend).prepare(experts, config, topology)
            if settings.device.type == "cuda" and layer in self._checked_layers:
                torch.cuda.synchronize(settings.device)  # the check waits anyway; now each phase gets its own time
            if settings.tuning.is_on:
                with self._phases.step_of(Phase.TUNING, num_layers):
                    return self._tuner.tuned(runner, quant_info, experts, topology)
            return self._tuner.tuned(runner, quant_info, experts, topology)

    def _in_service(self, quant_info: MoeQuantInfo) -> MoeQuantInfo:
        """The layer writes a part of a sum where the ranks read it. The checks before keep several results at once."""
        if self.topology.a2a is not MoeA2ABackend.NONE or self._groups.tp.size == 1:
            return quant_info
        topology = dataclasses.replace(quant_info.topology, allocator=self._groups.tp.empty)
        served: MoeQuantInfo = dataclasses.replace(quant_info, topology=topology)  # type: ignore[type-var]
        return served

    def _dispatch_dtype(self, path: _Path, *, knows_input_scale: bool = False) -> DispatchDtype:
        """What a layer's tokens travel as; all dispatch formats of a transport carry the same."""
        context = DispatchContext(
            dispatch_format=path.runner.dispatch_formats[-1],
            format_name=path.format_name,
            device=self.settings.device,
            knows_input_scale=knows_input_scale,
            can_send_nvfp4=self._transport is not None and self._transport.can_send_nvfp4,
        )
        return load_backend(path.runner.backend).dispatch_dtype(context)

    def _connected(self) -> Transport:
        if self._transport is None:
            raise MoeConfigError("MoeBuilder.connect must come before build")
        return self._transport

    @property
    def _checked_layers(self) -> list[int]:
        layers = {"off": [], "first": [min(self._paths)], "all": list(self._paths)}
        return layers[self.settings.checked_layers]

    def _check_transport(
        self, dispatcher: Dispatcher[Any, Any], runner: MoeRunner, topology: Topology, wants: DispatchSpec
    ) -> None:
        """One round trip, where tokens or sums cross ranks."""
        if topology.is_partial or topology.a2a is not MoeA2ABackend.NONE:
            check_round_trip(
                dispatcher,
                runner.dispatch_formats,
                runner.config,
                topology,
                max_num_tokens=min(runner.config.max_num_tokens, self.settings.deepep.max_dispatch_tokens),
                input_scale=wants.input_scale,
            )

    def _logits_dtype(self, path: _Path) -> torch.dtype:
        requested = self.settings.router_logits_dtype
        if requested == "auto":
            return load_backend(path.runner.backend).router_logits_dtype(path.format_name)
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[requested]


def check_backend(backend: MoeBackend, settings: ModelSettings, arch: str) -> None:
    """Refuse settings that this backend cannot follow on a device of `arch`, which need not be here.

    Raises:
        UnsupportedPathError: (of moe) says which can.
    """
    if settings.balance.has_replicas and not load_backend(backend).can_move_experts:
        movable = ", ".join(name for name in BACKEND_MODULES if load_backend(name).can_move_experts)
        raise UnsupportedPathError(
            f"enable_eplb is set, but --moe-backend {backend} cannot exchange experts between ranks: set it to "
            f"one of {movable}, or leave enable_eplb off"
        )
    if settings.deepep.overlaps_down_gemm:
        _check_overlap(backend, settings, arch)


def _check_overlap(backend: MoeBackend, settings: ModelSettings, arch: str) -> None:
    """Refuse a combine beside the second GEMM where transport or backend cannot; no weight is needed.

    Raises:
        UnsupportedPathError: (of moe) says which can.
    """
    a2a, mode = settings.moe_a2a_backend, settings.deepep.mode
    if a2a is not MoeA2ABackend.DEEPEP or not mode.has_low_latency:
        found = f"--moe-a2a-backend {a2a}" + (f" with --deepep-mode {mode}" if a2a is MoeA2ABackend.DEEPEP else "")
        raise UnsupportedPathError(
            f"enable_single_batch_overlap is set, but {found} has no combine that takes signals: use "
            "--moe-a2a-backend deepep with --deepep-mode low_latency or auto, or leave it off"
        )
    if load_backend(backend).signal_kind(arch) is None:
        can = [name for name in BACKEND_MODULES if load_backend(name).signal_kind(arch) is not None]
        raise UnsupportedPathError(
            f"enable_single_batch_overlap is set, but the second GEMM of --moe-backend {backend} signals nothing here: "
            f"use {' or '.join(can) or 'another GPU'}, or leave it off"
        )
