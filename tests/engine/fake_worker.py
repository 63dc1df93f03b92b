"""Engine process with a core without torch; the model folder's name chooses a misbehaviour. Run by `EngineClient`."""

import time

from engine.errors import EngineConfigError, MachineError
from engine.types import EngineInfo, EngineOutput, EngineStats
from engine.worker import build_core, main
from loaders.phases import Phase

POISON = 66
INFO = EngineInfo(
    max_model_len=512,
    vocab_size=97,
    page_size=4,
    num_pages=256,
    num_kv_tokens=1024,
    max_requests=64,
    device="none",
    dtype="none",
    moe_paths=[],
    load_seconds=0,
)


class ScriptedCore:
    """Every request gets one token a step, its first prompt id, until `max_tokens`."""

    def __init__(self, step_s=0.0, on_poison=lambda: None):
        self.info = INFO
        self.step_s = step_s
        self.on_poison = on_poison
        self.requests = {}
        self.early_outputs = []
        self.num_generated = 0

    @property
    def has_work(self):
        return bool(self.requests or self.early_outputs)

    def add(self, request):
        self.requests[request.request_id] = [request, 0]

    def abort(self, request_id):
        if self.requests.pop(request_id, None) is not None:
            self.early_outputs.append(EngineOutput(request_id=request_id, finish_reason="abort"))

    def step(self):
        time.sleep(self.step_s)
        outputs, self.early_outputs = self.early_outputs, []
        for request_id, state in list(self.requests.items()):
            request = state[0]
            if POISON in request.prompt_ids:
                self.on_poison()
            state[1] += 1
            self.num_generated += 1
            is_last = state[1] == request.sampling.max_tokens
            if is_last:
                del self.requests[request_id]
            outputs.append(
                EngineOutput(
                    request_id=request_id, token_ids=request.prompt_ids[:1], finish_reason="length" if is_last else None
                )
            )
        return outputs

    def describe(self):
        return f"{len(self.requests)} requests run"

    def expert_load(self):
        """Nothing is counted."""

    def stats(self):
        return EngineStats(
            num_running=len(self.requests),
            num_waiting=0,
            num_pages_used=0,
            num_pages_total=256,
            num_steps=0,
            num_prompt_tokens=0,
            num_generated_tokens=self.num_generated,
            num_cached_tokens=0,
            num_preemptions=0,
        )


def _lose_device():
    raise RuntimeError("the device fell off the bus")


def build(setup, phases):
    match setup.config.model.name:
        case "fake":
            return ScriptedCore()
        case "slow":
            return ScriptedCore(step_s=0.01)
        case "hang":
            return ScriptedCore(on_poison=lambda: time.sleep(3600))
        case "device-loss":
            return ScriptedCore(on_poison=_lose_device)
        case "missing":
            raise MachineError("model is missing: no such folder")
        case "misset":
            raise EngineConfigError("num_pages is 0: it must be at least 1")
        case "bug":
            raise RuntimeError("a bug")
        case "loading":
            return time.sleep(3600)
        case "layers":
            with phases.phase(Phase.WEIGHTS, total=24):
                phases.advance(Phase.WEIGHTS, 7, num_bytes=2**30)
                time.sleep(3600)
    return build_core(setup, phases)


if __name__ == "__main__":
    main(build)
