"""Engine process of `bench_http`: a token for every request at a fixed pace, so that only HTTP is measured."""

import os
import time

from engine.types import EngineInfo, EngineOutput, EngineRequest, EngineStats
from engine.worker import main

STEP_S = "BENCH_HTTP_STEP_S"  # environment variable: seconds per step
INFO = EngineInfo(
    max_model_len=4096,
    vocab_size=4096,
    page_size=16,
    num_pages=65536,
    num_kv_tokens=65536 * 16,
    max_requests=1024,
    device="none",
    dtype="none",
    moe_paths=[],
    load_seconds=0,
)


class PacedCore:
    """Every step sleeps, then gives each request its first prompt id again."""

    def __init__(self, step_s: float) -> None:
        self.info = INFO
        self._step_s = step_s
        self._left: dict[str, tuple[int, int]] = {}  # token id and tokens left, by request
        self._num_generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: EngineRequest) -> None:
        self._left[request.request_id] = (request.prompt_ids[0], request.sampling.max_tokens)

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def step(self) -> list[EngineOutput]:
        time.sleep(self._step_s)
        outputs = []
        for request_id, (token_id, left) in list(self._left.items()):
            reason = "length" if left == 1 else None
            outputs.append(EngineOutput(request_id=request_id, token_ids=[token_id], finish_reason=reason))
            self._left[request_id] = (token_id, left - 1)
            if left == 1:
                del self._left[request_id]
        self._num_generated += len(outputs)
        return outputs

    def stats(self) -> EngineStats:
        counts = dict.fromkeys((name for name in EngineStats.__struct_fields__ if name.startswith("num_")), 0)
        return EngineStats(**counts | {"num_running": len(self._left), "num_generated_tokens": self._num_generated})

    def expert_load(self) -> None:
        """Nothing is counted."""

    def describe(self) -> str:
        return f"{len(self._left)} requests run"


if __name__ == "__main__":
    main(lambda _setup, _phases: PacedCore(float(os.environ[STEP_S])))  # type: ignore[arg-type]
