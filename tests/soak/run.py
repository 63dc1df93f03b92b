"""One run of the soak test: warm up, let the clients act, wait until it is quiet, judge."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from tests.soak.clients import Report, run_clients
from tests.soak.probe import LivenessProbe
from tests.soak.service import Service, start

_QUIET_TIMEOUT_S = 60
_SETTLE_S = 5.0  # memory of large bodies is given back a second after the last


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how hard. Times are in seconds."""

    seconds: float
    warm_up_seconds: float
    rest_seconds: float
    num_clients: int = 48
    seed: int = 1
    max_liveness_s: float = 1.0
    max_growth: float = 1.2  # memory afterwards, as a multiple of what it was once warm
    flags: tuple[str, ...] = ()  # of the service


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was seen, and what of it is wrong; an empty list is a pass."""

    faults: list[str]
    numbers: dict[str, object]


def soak(plan: Plan, folder: Path) -> Result:
    """Run the service and the clients; the service's output is left in the folder."""
    with start(folder, plan.flags) as service:
        _act(service, plan, plan.warm_up_seconds, seed=plan.seed + 1)
        _wait_until_quiet(service)
        time.sleep(min(plan.rest_seconds, _SETTLE_S))
        warm_mib, before = service.resident_mib(), service.metrics()
        with LivenessProbe(service.url) as probe:
            report = _act(service, plan, plan.seconds, seed=plan.seed)
        quiet_faults = _wait_until_quiet(service)
        peak_mib = service.resident_mib()
        time.sleep(plan.rest_seconds)
        after_mib, after = service.resident_mib(), service.metrics()
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    slowest_s = max(probe.seconds)
    faults = [*report.wrong[:20], *probe.failures[:5], *quiet_faults, *_wrong_sums(report, counted)]
    if slowest_s > plan.max_liveness_s:
        faults.append(f"liveness took {slowest_s:.2f} s, at most {plan.max_liveness_s:g} s are allowed")
    for process, mib in after_mib.items():
        if mib > plan.max_growth * warm_mib[process]:
            faults.append(f"the {process} process has {mib:.0f} MiB, it had {warm_mib[process]:.0f} once warm")
    numbers = {
        "requests": report.actions.total(),
        "actions": dict(report.actions),
        "statuses": dict(report.statuses),
        "completion_tokens": report.num_completion_tokens,
        "liveness_probes": len(probe.seconds),
        "slowest_liveness_s": round(slowest_s, 3),
        "warm_mib": _rounded(warm_mib),
        "end_mib": _rounded(peak_mib),
        "rested_mib": _rounded(after_mib),
    }
    return Result(faults=faults, numbers=numbers)


def _act(service: Service, plan: Plan, seconds: float, *, seed: int) -> Report:
    return asyncio.run(run_clients(service.url, num_clients=plan.num_clients, seconds=seconds, seed=seed))


def _wait_until_quiet(service: Service) -> list[str]:
    """What is left behind when all clients have gone."""
    until_s = time.monotonic() + _QUIET_TIMEOUT_S
    while not service.engine_is_idle():
        if time.monotonic() > until_s:
            return ["requests are left at the engine after all clients have gone"]
        time.sleep(0.1)
    return []


def _wrong_sums(report: Report, counted: dict[str, float]) -> list[str]:
    expected = {
        "moe_serve_prompt_tokens_total": report.num_prompt_tokens,
        "moe_serve_completion_tokens_total": report.num_completion_tokens,
        "moe_serve_choices_finished_total": report.num_choices,
    }
    return [
        f"{name} grew by {counted.get(name, 0):g}, the clients count {value}"
        for name, value in expected.items()
        if counted.get(name, 0) != value
    ]


def _rounded(sizes: dict[str, float]) -> dict[str, int]:
    return {name: round(mib) for name, mib in sizes.items()}
