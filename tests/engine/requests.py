"""Short ways to write requests and to read answers. No torch."""

from engine.types import EngineRequest, SamplingParams


def request(request_id, prompt_ids, max_tokens=8, **sampling):
    sampling.setdefault("temperature", 0.0)
    return EngineRequest(
        request_id=request_id, prompt_ids=list(prompt_ids), sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


def run_all(core, requests=(), max_steps=5000):
    """Add the requests, step until idle; outputs per request id, in order."""
    for item in requests:
        core.add(item)
    outputs = {}
    for _ in range(max_steps):
        if not core.has_work:
            return outputs
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"not idle after {max_steps} steps")


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]
