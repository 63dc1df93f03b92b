"""`RankLinks`: this rank's connections to the others, over torch.distributed and ZMQ.

torch's TCPStore   where the ranks have met (engine.rank_meeting), and where they leave the addresses of their sockets
world              torch.distributed's default group: gloo, and NCCL beside it where every rank has a GPU of its own
tensor-parallel    tokens that the first rank of a group chose and the next step needs on the others
ZMQ                steps from the first rank of a group to its others; wake-up calls between leaders, and which HTTP
                   processes come and go, from rank 0
TCP                the agreement before every step, between leaders: the ranks that schedule, one a data-parallel group
"""

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq
from torch import distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from engine.agreement import Agreement
from engine.config import EngineConfig
from engine.messages import RankSetup, ToEngine, Wake, bind, new_address
from engine.model_settings import rank_device_name
from engine.rank_meeting import own_host
from engine.step_link import StepReceiver, StepSender
from engine.word_link import WordLink

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_COLLECTIVE_S = 86_400.0  # the parent ends a step that hangs, and loading may take long

Socket = zmq.Socket[bytes]


class RankLinks:
    """Made by every rank at the same time, before the model is loaded."""

    def __init__(
        self,
        config: EngineConfig,
        place: RankSetup,
        store: Store,
        context: "zmq.Context[Socket]",
        requests: Socket,
    ) -> None:
        """`requests` is the bound socket on which this rank takes requests, and wake-up calls of other ranks."""
        tp_size, self.dp_size = config.tensor_parallel_size, config.data_parallel_size
        self.rank = place.rank
        self.wants_stop = False
        self.is_stopped = False
        self.low_latency_limit = None if config.moe_a2a_backend == "none" else config.deepep_max_dispatch_tokens
        first = place.rank // tp_size * tp_size
        self.leads = place.rank == first
        self._context, self._store = context, store
        self._host = None if config.nnodes == 1 else own_host(place)
        self.requests_address = self._bind(requests)

        if self._host is None:  # by default gloo takes the address of the host's name, which need not exist
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            _backend(config, place.rank), store=PrefixStore("torch", store), rank=place.rank,
            world_size=config.num_ranks, timeout=timedelta(seconds=_COLLECTIVE_S),
        )  # fmt: skip
        self.world: ProcessGroup = distributed.group.WORLD  # type: ignore[assignment]
        leaders = list(range(0, config.num_ranks, tp_size))
        groups = [_new_group(list(range(start, start + tp_size))) for start in leaders] if tp_size > 1 else []
        self._tp_group = groups[first // tp_size] if groups else None
        self._first = first

        self.steps = StepSender([])
        self._leaders: list[Socket] = []
        if self.leads:
            self._set("requests", self.requests_address)
            self.steps = StepSender([self._connect("steps", rank) for rank in range(first + 1, first + tp_size)])
            self._leaders = [self._connect("requests", rank) for rank in leaders if rank != self.rank]
        else:
            receiver = _open(context, zmq.PULL)
            self._set("steps", self._bind(receiver))
            self.received_steps = StepReceiver(receiver)
        self._words = self._meet_leaders(leaders) if self.leads and self.dp_size > 1 else None
        self.agreement = Agreement(None if self._words is None else self._words.max_over_ranks, self._wake_others)

    def min(self, value: int) -> int:
        """The smallest value of all ranks."""
        numbers = torch.tensor([value])
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MIN)
        return int(numbers)

    def share_tokens(self, tokens_M: torch.Tensor) -> None:
        """Overwrite the tokens of a group's ranks with those of its first rank; on a GPU nobody waits for it."""
        if self._tp_group is not None:
            distributed.broadcast(tokens_M, src=self._first, group=self._tp_group)

    def close(self) -> None:
        """End the connections to other ranks; all ranks do so at about the same time."""
        if self._words is not None:
            self._words.close()
        distributed.destroy_process_group()

    def _meet_leaders(self, leaders: list[int]) -> WordLink:
        listener = socket.create_server((self._host or "127.0.0.1", 0))
        self._set("words", msgspec.json.encode(listener.getsockname()).decode())
        earlier = [self._store.get(f"words/{rank}") for rank in leaders if rank < self.rank]
        addresses = [msgspec.json.decode(each, type=tuple[str, int]) for each in earlier]
        return WordLink.connect(listener, addresses, len(leaders) - 1 - len(addresses))

    def tell_leaders(self, message: ToEngine) -> None:
        """Send to the other ranks that schedule."""
        for leader in self._leaders:
            leader.send(msgspec.msgpack.encode(message))

    def _wake_others(self, num_waits: int) -> None:
        self.tell_leaders(Wake(num_waits))

    def _bind(self, listener: Socket) -> str:
        return bind(listener, new_address() if self._host is None else f"tcp://{self._host}:*")

    def _set(self, name: str, address: str) -> None:
        self._store.set(f"{name}/{self.rank}", address)

    def _connect(self, name: str, rank: int) -> Socket:
        sender = _open(self._context, zmq.PUSH)
        sender.connect(self._store.get(f"{name}/{rank}").decode())
        return sender


def _open(context: "zmq.Context[Socket]", kind: int) -> Socket:
    opened = context.socket(kind)
    opened.set_hwm(0)
    return opened


def _new_group(ranks: list[int]) -> Any:
    """A group of some ranks; every rank of the world makes all groups, in the same order."""
    return distributed.new_group(ranks, timeout=timedelta(seconds=_COLLECTIVE_S))


def _backend(config: EngineConfig, rank: int) -> str:
    """Gloo, and NCCL for tensors of a GPU that this rank has for itself; NCCL refuses two ranks on one GPU."""
    has_own_gpu = rank_device_name(config, rank).startswith("cuda") and not config.device.startswith("cuda:")
    return "cpu:gloo,cuda:nccl" if has_own_gpu else "gloo"
