"""Engine process in which some prompt tokens break their step on the device. Run by `EngineClient`."""

import torch

from engine.runner import ModelRunner
from engine.worker import main

NO_MEMORY, BREAKS, CRASHES, HANGS = range(4089, 4093)  # reserved tokens, which the model never writes
MOST_TOKENS = 16  # that fit into memory beside a `NO_MEMORY`
_FOR_EVER = 1 << 50  # cycles
_TOO_MUCH = 1 << 50  # bytes


def make_batch(self, step):
    """`ModelRunner.make_batch`, with faults behind it: the step's pages are known by then, as in a real fault."""
    batch = original(self, step)
    ids = set(step.input_ids.tolist())
    if NO_MEMORY in ids and len(step.input_ids) > MOST_TOKENS:
        torch.empty(_TOO_MUCH, dtype=torch.uint8, device=self.model.device)
    if BREAKS in ids:
        raise RuntimeError("this step breaks")
    if CRASHES in ids:
        self.tokens_M[torch.full((1,), len(self.tokens_M), device=self.model.device)]
    if HANGS in ids:
        torch.cuda._sleep(_FOR_EVER)
    return batch


if __name__ == "__main__":
    original, ModelRunner.make_batch = ModelRunner.make_batch, make_batch
    main()
