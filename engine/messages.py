"""Messages between HTTP processes and the engine, in msgpack, and their sockets. Their contents are in `types`."""

import os
import secrets

import msgspec
import zmq

from engine.config import EngineConfig
from engine.types import CallOff, EngineInfo, EngineOutput, EngineRequest, EngineStats, ExpertLoad, OrderKind
from loaders.phases import StartProgress

FOUNDER = 0
"""Origin of the process that started the engine; each process that joins has a higher number of its own."""


NO_REQUESTS = msgspec.msgpack.encode([])
"""`Outputs.token_requests` if there are none."""


class Add(msgspec.Struct, frozen=True, tag=True):
    """To the engine: start this request, whose outputs go to the process `origin`."""

    request: EngineRequest
    origin: int = FOUNDER


class Abort(msgspec.Struct, frozen=True, tag=True):
    """To the engine: end this request; nothing happens if it is over."""

    request_id: str


class Join(msgspec.Struct, frozen=True, tag=True):
    """To the engine: send the outputs of `origin`, a number that was never used before, to this address.

    The first rank gets it and passes it on to the others that schedule, as it does with `Leave`.
    """

    origin: int
    address: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To the engine: the process `origin` has ended, and so do its requests."""

    origin: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """To the engine: leave the step loop."""


class Order(msgspec.Struct, frozen=True, tag=True):
    """To the engine: do this, and answer the process `origin` with `Obeyed` of the same number."""

    kind: OrderKind
    number: int
    origin: int = FOUNDER


class Obeyed(msgspec.Struct, frozen=True, tag=True):
    """From the engine: an order is carried out, or `error` says why it is not."""

    number: int
    error: str | None = None


class Wake(msgspec.Struct, frozen=True, tag=True):
    """From one scheduling rank to another that waits: there is work; `engine.agreement` counts the waits."""

    num_waits: int


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """From a rank that schedules: the outputs of one step, for all requests of one process.

    Most are one more token and nothing else. Those are `token_ids`, and `token_requests` is the msgpack list of their
    request ids: it seldom changes from step to step, so it need not be decoded anew. No request is in both parts.
    """

    outputs: list[EngineOutput]
    token_requests: bytes = NO_REQUESTS
    token_ids: list[int] = []
    rank: int = 0


class Beat(msgspec.Struct, frozen=True, tag=True):
    """From the engine, twice a second and more: `loop_age_s` is the time since the step loop last turned.

    The beat itself comes from a thread of its own and proves only that the process runs. A loop that is busy with a
    long prompt turns after every chunk, so its age stays small; one that hangs inside a step grows old.
    While the model loads there are no statistics, the age is 0, and `start` says how far the start is. Ranks that do
    not schedule never have statistics. `expert_load` is the same from every rank that schedules.
    """

    stats: EngineStats | None
    loop_age_s: float
    start: StartProgress | None = None
    rank: int = 0
    expert_load: ExpertLoad | None = None


class Held(msgspec.Struct, frozen=True, tag=True):
    """To processes that joined: who holds places of this rank now, and how many of them came free since the start."""

    num_by_client: dict[str, int]
    num_freed: int
    rank: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From each rank, once to each process: the model is loaded and warm. `requests_address` is where a scheduling rank
    of several takes requests.
    """

    info: EngineInfo
    rank: int = 0
    requests_address: str | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine, as its last word: why it cannot start or go on. `time_s` since the epoch: the first is the cause
    of the others. `is_setting`: it cannot start before a setting or the model's files are changed. `has_lost_ranks`: a
    connection to another rank has ended, so that one is to blame.
    """

    message: str
    rank: int = 0
    time_s: float = 0.0
    is_setting: bool = False
    has_lost_ranks: bool = False


ToEngine = Add | Abort | CallOff | Order | Join | Leave | Shutdown | Wake
FromEngine = Outputs | Beat | Held | Ready | Failed | CallOff | Obeyed


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's number and where the ranks meet: torch's TCPStore at `store_host`, which rank 0 runs.

    With one host the parent has bound its port, and rank 0 inherits the descriptor. With several hosts rank 0 binds it,
    and publishes the addresses of the parent's sockets for the ranks on other hosts.
    """

    rank: int
    store_host: str
    store_port: int
    store_fd: int | None = None
    outputs_address: str = ""  # of the parent on host 0, reachable from other hosts
    pulse_address: str = ""


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process reads from its standard input at start, pickled. Addresses are of ZMQ sockets."""

    config: EngineConfig
    requests_address: str  # bound by the engine process; empty if it chooses one
    outputs_address: str  # bound by the parent; empty on hosts other than 0
    log_level: int
    place: RankSetup | None = None  # None for a single rank


EXIT_FAILED, EXIT_SETTING = 3, 5  # exit statuses of an engine process that has sent `Failed`; 5 if `is_setting`
EXITS_TOLD = (EXIT_FAILED, EXIT_SETTING)


def new_address() -> str:
    """A name for a socket in Linux's abstract namespace: it needs no writable folder and vanishes with its process."""
    return f"ipc://@moe-serve-{secrets.token_hex(16)}"


def bind(socket: "zmq.Socket[bytes]", address: str) -> str:
    """Listen at the address; returns it, with the port chosen for `tcp://HOST:*`. Abstract names have no permissions,
    so connections of other users are refused here.
    """
    socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    socket.bind(address)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
