"""`MoeRunner`: computes expert outputs from dispatched tokens, with any backend and any transport."""

from collections.abc import Callable

from moe import registry
from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.errors import MoeConfigError, UnsupportedPathError
from moe.types import CombineInput, DispatchOutput, MoeQuantInfo, RunState

Path = Callable[[DispatchOutput, MoeQuantInfo, RunState], CombineInput]


class MoeRunner:
    """Runs the experts of one layer.

    The constructor resolves the path, before any weight is read: the fused function of (transport, backend) if there is
    one, else the runner core with a pre-permute for every dispatch format that the transport can produce.

    Raises:
        UnsupportedPathError: nothing is registered for the pair, or the backend refuses a setting.
    """

    def __init__(
        self,
        backend: MoeBackend,
        a2a: MoeA2ABackend,
        config: MoeRunnerConfig,
        *,
        dispatch_formats: tuple[DispatchFormat, ...] | None = None,
    ) -> None:
        if backend is MoeBackend.AUTO:
            raise MoeConfigError("MoeRunner needs a chosen backend; resolve 'auto' with moe.choose.select first")
        self.backend = backend
        self.a2a = a2a
        self.config = config
        self.dispatch_formats = dispatch_formats or a2a.dispatch_formats
        self._overlap_args: object = None
        reason = registry.load_backend(backend).unsupported_reason(config)
        if reason:
            raise UnsupportedPathError(f"--moe-backend {backend}: {reason}")
        self._paths = self._resolve()

    def _resolve(self) -> dict[DispatchFormat, Path]:
        missing = registry.missing_formats(self.backend, self.a2a, self.dispatch_formats)
        if missing:
            raise UnsupportedPathError(_explain(self.backend, self.a2a, missing))
        fused = registry.fused_func(self.a2a, self.backend)
        if fused is not None:
            path = self._fused_path(fused)
            return dict.fromkeys(self.dispatch_formats, path)
        return {dispatch_format: self._three_part_path(dispatch_format) for dispatch_format in self.dispatch_formats}

    def _fused_path(self, fused: registry.FusedFunc) -> Path:
        config = self.config
        return lambda dispatched, quant_info, state: fused(dispatched, quant_info, config, state)

    def _three_part_path(self, dispatch_format: DispatchFormat) -> Path:
        parts = registry.three_part(dispatch_format, self.backend)
        if parts is None:
            raise UnsupportedPathError(_explain(self.backend, self.a2a, [dispatch_format]))
        pre, core_class, post = parts
        config = self.config
        core = core_class(config)

        def path(dispatched: DispatchOutput, quant_info: MoeQuantInfo, state: RunState) -> CombineInput:
            core_input = pre(dispatched, quant_info, config, state)
            core_output = core.run(core_input, quant_info, state)
            if post is None:
                return dispatched.result(core_output, quant_info.topology.is_partial)
            return post(core_output, dispatched, quant_info, config, state)

        return path

    def set_overlap_args(self, overlap_args: object) -> None:
        """Set arguments that let the next `run` share the device with other work. Used once."""
        self._overlap_args = overlap_args

    def run(self, dispatch_output: DispatchOutput, quant_info: MoeQuantInfo) -> CombineInput:
        """Compute the local experts for the dispatched tokens.

        No kernel runs if the host knows that there are no tokens and there are no overlap arguments.

        Raises:
            UnsupportedPathError: the runner was not built for this dispatch format.
            MoeConfigError: overlap arguments are set both for this run and in the quant info.
        """
        try:
            overlap_args = self._overlap_args
            default = getattr(quant_info, "overlap_args", None)
            if overlap_args is not None and default is not None:
                raise MoeConfigError("overlap arguments are set for this run and in the quant info: keep one")
            overlap_args = overlap_args if overlap_args is not None else default
            if dispatch_output.num_tokens == 0 and overlap_args is None:
                empty = dispatch_output.hidden_states.new_empty((0, self.config.hidden_size), dtype=self.config.dtype)
                return dispatch_output.result(empty, is_partial=False)
            path = self._paths.get(dispatch_output.format)
            if path is None:
                built_for = ", ".join(self._paths)
                raise UnsupportedPathError(
                    f"this runner was built for {built_for}, but the transport sent {dispatch_output.format}"
                )
            return path(dispatch_output, quant_info, RunState(overlap_args=overlap_args))
        finally:
            self._overlap_args = None


def _explain(backend: MoeBackend, a2a: MoeA2ABackend, missing: list[DispatchFormat]) -> str:
    """Error message that names the unsupported pair, what works instead, and the flag to change."""

    def how(candidate: MoeBackend, transport: MoeA2ABackend) -> str | None:
        """None if the pair has no path, else a note on the formats that it supports."""
        lacking = registry.missing_formats(candidate, transport, transport.dispatch_formats)
        has = [dispatch_format for dispatch_format in transport.dispatch_formats if dispatch_format not in lacking]
        return (f" with {', '.join(has)} only" if lacking else "") if has else None

    hardware = {candidate: registry.load_backend(candidate).hardware for candidate in registry.BACKEND_MODULES}
    transports = [f"{transport}{note}" for transport in MoeA2ABackend if (note := how(backend, transport)) is not None]
    backends = [
        f"{candidate}{note} ({hardware[candidate]})"
        for candidate in hardware
        if (note := how(candidate, a2a)) is not None
    ]
    return (
        f"--moe-backend {backend} with --moe-a2a-backend {a2a} has no path for {', '.join(missing)}. "
        f"{backend} ({hardware[backend]}) works with --moe-a2a-backend {', '.join(transports) or 'nothing'}; "
        f"{a2a} works with --moe-backend {', '.join(backends) or 'nothing'}."
    )
