"""`moe-serve explain`: which backends can run a GPU, format and transport, and why the others cannot. Needs no GPU."""

from dataclasses import dataclass

from moe.choose.ranking import rank_backends
from moe.choose.select import verdicts
from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.device import Device
from moe.errors import MoeConfigError

ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950", "cpu")
FORMATS = ("bf16", "fp8_block", "fp8_tensor", "mxfp4", "nvfp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One backend. `reason` is None if it is usable. `source` says why `auto` takes this row; None on other rows."""

    backend: MoeBackend
    hardware: str
    reason: str | None
    source: str | None

    @property
    def is_chosen(self) -> bool:
        """True for the backend that `--moe-backend auto` takes."""
        return self.source is not None


def explain(
    arch: str,
    format_name: str,
    a2a: MoeA2ABackend,
    config: MoeRunnerConfig,
    dispatch_formats: tuple[DispatchFormat, ...] | None = None,
) -> list[Row]:
    """A row per backend, in the order in which `auto` tries them.

    `dispatch_formats` are those the transport may send (`DeepepMode.dispatch_formats`); by default, all it supports.

    Raises:
        MoeConfigError: unknown architecture or format; the message lists the known ones.
    """
    for flag, value, known in (("--gpu", arch, ARCHS), ("--format", format_name, FORMATS)):
        if value not in known:
            raise MoeConfigError(f"{flag} {value} is not known; known: {', '.join(known)}")
    table = verdicts(Device(arch=arch), format_name, a2a, config, dispatch_formats)
    ranking = rank_backends(Device(arch=arch), format_name, a2a, config)
    chosen = next((verdict.backend for verdict in table if verdict.reason is None), None)
    return [
        Row(
            backend=verdict.backend,
            hardware=verdict.hardware,
            reason=verdict.reason,
            source=ranking.source_of(verdict.backend) if verdict.backend is chosen else None,
        )
        for verdict in table
    ]


def render(rows: list[Row]) -> str:
    """One line per backend: "usable" or the reason why not, and on the chosen one why `auto` takes it."""
    width = max(len(backend) for backend in MoeBackend)
    lines = []
    for row in rows:
        text = "usable" if row.reason is None else row.reason
        lines.append(f"{row.backend:<{width}}  {text}{f'  <- auto, by {row.source}' if row.is_chosen else ''}")
    if not any(row.is_chosen for row in rows):
        lines.append("auto: no backend can run this")
    return "\n".join(lines)
