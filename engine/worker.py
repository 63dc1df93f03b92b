"""The engine process: reads requests from a socket, steps the core, sends its outputs. Started by `engine.client`.

It ignores Ctrl-C (the parent decides when to stop) and ends when its standard input closes, which the system does for
a parent that dies in whatever way.
"""

import gc
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from engine.collector import resting_collector
from engine.compile_watch import CompileWatch
from engine.config import EngineConfig
from engine.errors import OrderError
from engine.logs import log_to_stderr
from engine.messages import (
    EXIT_FAILED,
    EXIT_SETTING,
    Abort,
    Add,
    Beat,
    Failed,
    FromEngine,
    Join,
    Leave,
    Obeyed,
    Order,
    Ready,
    Shutdown,
    ToEngine,
    WorkerSetup,
    bind,
)
from engine.origins import Origins
from engine.process import exit_with_parent
from engine.stack_dump import dump_on_signal
from engine.start_errors import is_user_error, is_wrong_setting
from engine.step_profile import StepProfile
from engine.types import CallOff, EngineInfo, EngineStats, ExpertLoad, OrderKind
from loaders.phases import StartPhases

if TYPE_CHECKING:
    from engine.core import EngineCore

BEAT_INTERVAL_S = 0.25
_IDLE_WAIT_MS = 250
_LAST_WORD_S = 0.5
_LINGER_MS = 2000  # for the last message before the process ends

logger = logging.getLogger("engine.worker")


class HasStats(Protocol):
    """What the step loop of a process runs."""

    info: EngineInfo

    def stats(self) -> EngineStats | None:
        """Counters of this moment."""

    def describe(self) -> str:
        """The state in words. May be called from another thread."""

    def expert_load(self) -> ExpertLoad | None:
        """Tokens by expert, if they are counted."""


class Heartbeat(threading.Thread):
    """Sends a `Beat` at a steady pace, on sockets of its own, whatever the step loop is doing.

    It ends the process when a step takes longer than `step_timeout_s`, counted in beats: a process that was stopped for
    a while is not to blame for that time.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, rank: int, step_timeout_s: float,
        phases: StartPhases, compiles: CompileWatch,
    ) -> None:  # fmt: skip
        super().__init__(name="heartbeat", daemon=True)
        self._core: HasStats | None = None
        self._addresses: tuple[str, ...] = (address,)  # replaced as a whole by the step loop
        self._rank = rank
        self._step_timeout_s = step_timeout_s
        self._phases, self._compiles = phases, compiles
        self._num_beats_of_turn = 0
        self._context = context
        self._wakes = threading.Event()
        self._has_ended = False
        self._turned_s = time.monotonic()

    @property
    def core(self) -> HasStats | None:
        """What the step loop runs; None while it loads."""
        return self._core

    def begin(self, core: HasStats) -> None:
        """The step loop runs `core` from now on. The next beat comes at once."""
        self.turn()
        self._core = core
        self._wakes.set()

    def beat_to(self, addresses: tuple[str, ...]) -> None:
        """Beat to these from now on, and at once: a process serves when it has heard a beat."""
        self._addresses = addresses
        self._wakes.set()

    def turn(self) -> None:
        """The step loop begins another turn."""
        self._turned_s = time.monotonic()
        self._num_beats_of_turn = 0

    def run(self) -> None:
        """Thread body."""
        sockets: dict[str, zmq.Socket[bytes]] = {}
        encoder = msgspec.msgpack.Encoder()
        while True:
            is_early = self._wakes.wait(BEAT_INTERVAL_S)
            self._wakes.clear()
            if self._has_ended:
                break
            core, addresses = self._core, self._addresses
            beat = self._beat(core)
            for address in sockets.keys() - set(addresses):
                sockets.pop(address).close(linger=0)
            for address in addresses:
                if address not in sockets:
                    sockets[address] = _connect(self._context, address)
                sockets[address].send(encoder.encode(beat))
            self._num_beats_of_turn += core is not None and not is_early
            if self._num_beats_of_turn * BEAT_INTERVAL_S > self._step_timeout_s:
                reason = f"a step has taken longer than step_timeout, {self._step_timeout_s:g} s"
                for socket in sockets.values():
                    socket.send(encoder.encode(Failed(reason, self._rank, time.time())))
                time.sleep(_LAST_WORD_S)
                os._exit(EXIT_FAILED)  # the step loop hangs, so nothing else can end the process
        for socket in sockets.values():
            socket.close(linger=0)  # a process that is gone must not hold up the end

    def _beat(self, core: "HasStats | None") -> Beat:
        if core is None:
            return Beat(None, 0.0, self._phases.progress(), self._rank)
        stats = core.stats()
        if stats is not None:
            stats = msgspec.structs.replace(stats, num_kernels_compiled_after_ready=self._compiles.count)
        return Beat(stats, time.monotonic() - self._turned_s, None, self._rank, core.expert_load())

    def end(self) -> None:
        """Stop beating and wait for the thread."""
        self._has_ended = True
        self._wakes.set()
        self.join()


class Worker:
    """Sockets, heartbeat and step loop of the engine process. `rank` counts the processes of one engine."""

    def __init__(self, setup: WorkerSetup, rank: int = 0) -> None:
        self._setup = setup
        self._rank = rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = _open(self._context, zmq.PULL)
        bind(self._requests, setup.requests_address)
        self._origins = Origins(
            lambda address: _connect(self._context, address), setup.outputs_address, setup.config.max_requests,
            rank=rank, num_schedulers=setup.config.data_parallel_size,
        )  # fmt: skip
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._phases = StartPhases()
        self._compiles = CompileWatch()
        self._profile = StepProfile(setup.config.profile_dir, rank)
        self._heartbeat = Heartbeat(
            self._context, setup.outputs_address, rank, setup.config.step_timeout, self._phases, self._compiles
        )

    def run(self, build: "Callable[[WorkerSetup, StartPhases], HasStats]") -> int:
        """Load, serve until told to stop; the exit status of the process."""
        self._heartbeat.start()
        try:
            core = build(self._setup, self._phases)
            gc.collect()
            gc.freeze()  # the model's objects live as long as the process: no collection need walk them again
            self._phases.finish()
            self._compiles.begin()
            self._heartbeat.begin(core)
            self._send(self._make_ready(core))
            self._serve(core)
            status = 0
        except Exception as error:  # the last stop: say why, then end
            if not is_user_error(error):  # the other process tells what a user can mend, once
                self._log(error)
            is_setting = self._heartbeat.core is None and is_wrong_setting(error)
            self._send(Failed(_describe(error), self._rank, time.time(), is_setting, self._has_lost_ranks(error)))
            status = EXIT_SETTING if is_setting else EXIT_FAILED
        self._compiles.end()
        self._heartbeat.end()
        self._context.destroy(linger=_LINGER_MS)
        return status

    def describe(self) -> str:
        """What the process does now, for people. May be called from another thread."""
        core, head = self._heartbeat.core, f"engine process of rank {self._rank}"
        return f"{head} starts: {self._phases.progress()}" if core is None else f"{head}: {core.describe()}"

    def _log(self, error: Exception) -> None:
        logger.error("the engine stops", exc_info=error)

    def _has_lost_ranks(self, error: Exception) -> bool:
        """As in `Failed`."""
        return False

    def _make_ready(self, core: HasStats) -> Ready:
        return Ready(core.info, self._rank)

    def _serve(self, core: Any) -> None:
        while self._take_requests(core):
            self._origins.send_outputs(core.step())

    def _take_requests(self, core: "EngineCore") -> bool:
        """Hand everything that has arrived to the core; wait a little if it has nothing else to do. False: stop."""
        self._heartbeat.turn()
        if not core.has_work:
            self._requests.poll(_IDLE_WAIT_MS)
            self._heartbeat.turn()
        while True:
            try:
                frame = self._requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            message = self._decoder.decode(frame)
            if isinstance(message, Add):
                self._origins.add(core, message)
            elif isinstance(message, Abort):
                self._origins.abort(core, message.request_id)
            elif isinstance(message, CallOff):
                self._origins.broadcast(message)
            elif isinstance(message, Order):
                self._origins.answer(message.origin, Obeyed(message.number, self._obey(core, message.kind)))
            elif isinstance(message, Join | Leave):
                self._note_process(core, message)
            elif not self._take_other(message):
                return False

    def _note_process(self, core: "EngineCore", message: Join | Leave) -> None:
        """An HTTP process comes or is gone."""
        if isinstance(message, Join):
            self._origins.join(message, self._make_ready(core))
        else:
            self._origins.leave(core, message.origin)
        self._heartbeat.beat_to(self._origins.addresses)

    def _obey(self, core: "EngineCore", kind: OrderKind) -> str | None:
        """Carry out an order; returns why that is not possible."""
        try:
            if kind == "reset_prefix_cache":
                core.reset_prefix_cache()
            elif kind == "start_profile":
                self._profile.start()
            else:
                self._profile.stop()
        except OrderError as error:
            return str(error)
        return None

    def _take_other(self, message: ToEngine) -> bool:
        """Handle a message that is not about a request. False: stop."""
        return not isinstance(message, Shutdown)

    def _send(self, message: FromEngine) -> None:
        self._origins.broadcast(message)


def _open(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.set_hwm(0)  # a slow reader must not hold up the step loop; the number of requests bounds what can pile up
    return socket


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    socket = _open(context, zmq.PUSH)
    socket.connect(address)
    return socket


def _describe(error: Exception) -> str:
    return str(error) if is_user_error(error) else f"{type(error).__name__}: {error}"


def build_core(setup: WorkerSetup, phases: StartPhases) -> "EngineCore":
    """The core of these settings, with the number of CPU threads they ask for; `phases` is the record of the start."""
    with resting_collector():
        from engine.core import EngineCore

    limit_threads(setup.config)
    return EngineCore(setup.config, phases=phases)


def limit_threads(config: EngineConfig) -> None:
    """Give torch the number of CPU threads that the settings ask for; ranks on one host share its cores."""
    import torch

    from moe.cpu.threads import usable_cpus

    # One core stays free for the HTTP process: OpenMP's threads spin at their barriers, so a step that shares its last
    # core with anything else is many times slower, not a little.
    num_free_cores = max(1, (usable_cpus() - 1) // len(config.local_ranks))
    torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), num_free_cores))


def main(build: "Callable[[WorkerSetup, StartPhases], EngineCore]" = build_core) -> None:
    """Entry of the process; `build` makes the core."""
    worker = Worker(read_setup())
    dump_on_signal(worker.describe)
    sys.exit(worker.run(build))


def read_setup() -> WorkerSetup:
    """What the parent has written to standard input. From then on the process ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup: WorkerSetup = pickle.load(sys.stdin.buffer)
    log_to_stderr(setup.log_level, setup.config.log_format)
    threading.Thread(target=exit_with_parent, name="parent-watch", daemon=True).start()
    return setup


if __name__ == "__main__":
    main()
