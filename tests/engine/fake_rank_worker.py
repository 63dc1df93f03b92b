"""Process of one rank around a scripted model whose steps meet in a collective, as real ones do.

The model folder's name says what goes wrong and on which rank, `kill-1` for example; `fine` for nothing. Most faults
wait for the token POISON in a step.
"""

import os
import signal
import time

import torch
from torch import distributed

from engine.core import EngineCore
from engine.errors import EngineConfigError, MachineError
from engine.rank_worker import main
from engine.ranked_executor import Follower
from tests.engine.fakes import FakeModel

POISON = 66
SLOW_S = 6.0  # longer than a rank may be without a heartbeat


class RankedFakeModel(FakeModel):
    """Refuses steps that the ranks do not run alike; gives every rank the same logits."""

    def __init__(self, links, tp_size, fault):
        super().__init__(max_model_len=512)
        self._links = links
        self._tp_size = tp_size
        self._fault = fault
        self.num_idle = 0

    def __call__(self, batch, plan, kv):
        if self._fault is not None:
            time.sleep(0.005)  # requests that run when the fault comes are not over before it
        if (batch.input_ids_T == POISON).any():
            _do(self._fault)
        largest = self._meet(batch.num_tokens, batch.input_ids_T.sum().item(), batch.all_ranks_decode, batch.is_decode)
        if batch.max_rank_tokens is not None and batch.max_rank_tokens != largest:
            raise RuntimeError(f"agreed on {batch.max_rank_tokens} tokens, but the largest step has {largest}")
        logits_RV = super().__call__(batch, plan, kv)
        logits_RV[:, POISON] = -1.0  # only a prompt holds it
        return logits_RV

    def run_idle(self, max_rank_tokens, all_ranks_decode):
        self.num_idle += 1
        if self._meet(0, 0, all_ranks_decode, True) != max_rank_tokens:
            raise RuntimeError("an idle step was announced with another size")

    def _meet(self, num_tokens, sum_of_ids, all_ranks_decode, decodes):
        rows = list(torch.zeros(distributed.get_world_size(), 4, dtype=torch.int64))
        distributed.all_gather(rows, torch.tensor([num_tokens, sum_of_ids, all_ranks_decode, decodes]))
        rows = torch.stack(rows)
        first = self._links.rank // self._tp_size * self._tp_size
        if not (rows[first : first + self._tp_size] == rows[self._links.rank]).all():
            raise RuntimeError(f"the ranks of a group run different steps: {rows.tolist()}")
        flags, all_decode = set(rows[:, 2].tolist()), rows[:, 3].all()
        if len(flags) > 1 or (flags == {1} and not all_decode):
            raise RuntimeError(f"the ranks did not agree on decoding: {rows.tolist()}")
        return int(rows[:, 0].max())


def _do(fault):
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError("the device fell off the bus")
        case "memory":
            raise torch.OutOfMemoryError("no memory")
        case "exit":
            os._exit(0)
        case "hang":
            time.sleep(3600)
        case "slow":
            time.sleep(SLOW_S)


def build(setup, links, phases):
    fault, _, rank = setup.config.model.name.partition("-")
    fault = None if fault == "fine" else fault if rank == str(links.rank) else "elsewhere"
    if fault == "missing":
        raise MachineError("model is missing: no such folder")
    if fault in ("misset", "late"):
        time.sleep(3 if fault == "late" else 0)  # late: the others have loaded, and wait
        raise EngineConfigError("num_pages is 0: it must be at least 1")
    if fault == "early":
        os.kill(os.getpid(), signal.SIGKILL)
    torch.set_num_threads(1)
    model = RankedFakeModel(links, setup.config.tensor_parallel_size, fault)
    return EngineCore(setup.config, model, ranks=links) if links.leads else Follower(setup.config, links, model)


if __name__ == "__main__":
    main(build)
