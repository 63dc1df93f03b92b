"""A rank's process for `bench_ranks`: a model that computes nothing, meets the other ranks, and notes the times."""

import json
import socket
import statistics
import time

import torch
from torch import distributed

from engine.agreement import Word
from engine.core import EngineCore
from engine.rank_worker import main
from engine.ranked_executor import Follower
from engine.word_link import WordLink
from model.batch import KvLayerSpec

VOCAB_SIZE = 1000


def connect_all():
    """A connection of each rank with each other, over which they meet.

    The thread that gloo keeps spins while a sum waits for its caller, for up to 3 ms, which two cores have no room for.
    """
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    listener, addresses = socket.create_server(("127.0.0.1", 0)), [None] * num_ranks
    distributed.all_gather_object(addresses, listener.getsockname())
    return WordLink.connect(listener, addresses[:rank], num_ranks - 1 - rank)


class NullModel:
    """Zeros for logits. In each step the ranks meet twice: the first time they also wait for the last to launch it, the
    second takes as long as meeting itself.
    """

    vocab_size, max_model_len, eos_token_ids = VOCAB_SIZE, 4096, ()
    kv_specs = (KvLayerSpec(num_heads=1, key_dim=1, value_dim=1),)
    can_compile_ahead = False
    moe_layers = ()
    balance = None
    asks_num_live = False
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, others):
        """`others`: the connections to the other ranks, None if there are none."""
        self._others = others
        self.notes = []  # of each step: its start, the seconds of the second meeting, CPU seconds of this thread

    def plan(self, batch):
        return None

    def __call__(self, batch, plan, kv):
        self.run_idle(batch.num_tokens, True)
        return torch.zeros(len(batch.logit_rows_R), VOCAB_SIZE)

    def run_idle(self, max_rank_tokens, all_ranks_decode):
        start_s, cpu_s, meeting_s = time.monotonic(), time.thread_time(), 0.0
        if self._others is not None:
            self._others.max_over_ranks([0, 0, 0])
            between_s = time.monotonic()
            self._others.max_over_ranks([0, 0, 0])
            meeting_s = time.monotonic() - between_s
        self.notes.append((start_s, meeting_s, cpu_s))


def time_agreements(agreement, repeats=1000):
    """Median us of an agreement to which all ranks come at once; in the end they wait again."""
    times = []
    for _ in range(repeats):
        start_s = time.monotonic()
        agreement.agree(Word(num_tokens=1))
        times.append(time.monotonic() - start_s)
    agreement.agree(Word())
    return round(statistics.median(times) * 1e6, 1)


def build(setup, links, phases):
    """`links` is None for a rank alone."""
    del phases
    torch.set_num_threads(1)
    model, config = NullModel(connect_all() if distributed.is_initialized() else None), setup.config
    rank = 0 if links is None else links.rank
    if links is None:
        runs = EngineCore(config, model)
    else:
        runs = EngineCore(config, model, ranks=links) if links.leads else Follower(config, links, model)
    model.notes.clear()
    agreement_us = time_agreements(links.agreement) if links is not None and links.leads else 0.0
    stats = runs.stats

    def noting_stats():  # the heartbeat asks four times a second
        notes = {"agreement_us": agreement_us, "steps": model.notes}
        (config.model / f"{rank}.json").write_text(json.dumps(notes))
        return stats()

    runs.stats = noting_stats
    return runs


if __name__ == "__main__":
    main(build)
