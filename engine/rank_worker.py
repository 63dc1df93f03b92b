"""The process of one rank of many. The first rank of a tensor-parallel group is an engine process like any other; the
others follow it. Started by `engine.rank_client` on host 0 and by `engine.node` on the others.
"""

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from engine.collector import resting_collector
from engine.messages import (
    EXIT_FAILED,
    EXIT_SETTING,
    Join,
    Leave,
    RankSetup,
    Ready,
    Shutdown,
    ToEngine,
    Wake,
    WorkerSetup,
)
from engine.stack_dump import dump_on_signal
from engine.start_errors import is_user_error, is_wrong_setting
from engine.step_link import Obey
from engine.types import OrderKind
from engine.word_link import RanksLostError
from engine.worker import HasStats, Worker, limit_threads, read_setup
from loaders.phases import Phase, StartPhases

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.rank_links import RankLinks
    from engine.rank_meeting import RankMeeting

logger = logging.getLogger("engine.worker")
Build = Callable[[WorkerSetup, "RankLinks", StartPhases], HasStats]

EXIT_LOST = 4  # exit status of a rank that host 0 has left or ended
PULSE = b"goes on"  # on the socket of the pulse, a few times a second
PULSE_END, PULSE_SETTING = b"is over", b"a setting is wrong"
_PULSE_LOST_S = 10.0
_LAST_WORD_S = 2.0  # host 0 blames a rank less than a second after the first failure


class RankWorker(Worker):
    """An engine process that knows of other ranks."""

    def __init__(self, setup: WorkerSetup, place: RankSetup, meeting: "RankMeeting | None") -> None:
        """`meeting` is over, or None on host 0, whose HTTP process is told how it goes on."""
        super().__init__(setup, place.rank)
        self._place = place
        self._meeting = meeting
        self._links: RankLinks | None = None

    def run_rank(self, build: Build) -> int:
        """As `run`; `build` also gets the connections to other ranks."""
        return self.run(lambda setup, phases: self._connect_and_build(setup, phases, build))

    def _connect_and_build(self, setup: WorkerSetup, phases: StartPhases, build: Build) -> HasStats:
        from engine.rank_links import RankLinks

        if self._meeting is None:
            self._meeting = self._meet(phases)
        self._links = RankLinks(setup.config, self._place, self._meeting.store, self._context, self._requests)
        return build(setup, self._links, phases)

    def _meet(self, phases: StartPhases) -> "RankMeeting":
        """On host 0; ranks of one host have nobody to wait for."""
        from engine.rank_meeting import RankMeeting

        config = self._setup.config
        meeting = RankMeeting(config, self._place)
        if config.nnodes > 1:
            with phases.phase(Phase.MEETING, config.num_ranks):
                meeting.meet(meeting.invitation(), phases)
        return meeting

    def _log(self, error: Exception) -> None:
        """One line if the others are lost: the rank that is to blame has more to say."""
        if self._has_lost_ranks(error):
            logger.warning("rank %d has lost other ranks: %s", self._rank, str(error).splitlines()[0])
        else:
            super()._log(error)

    def _has_lost_ranks(self, error: Exception) -> bool:
        return isinstance(error, RanksLostError) or _is_of_collective(error)

    def _make_ready(self, core: HasStats) -> Ready:
        links = self._links
        return Ready(core.info, self._rank, links.requests_address if links is not None and links.leads else None)

    def _serve(self, core: Any) -> None:
        links = self._links
        if links is None:
            raise RuntimeError("a rank serves before it is connected")
        if links.leads:
            while not links.is_stopped:
                if not self._take_requests(core):
                    links.wants_stop = True
                self._origins.send_outputs(core.step())
        else:
            core.follow(self._heartbeat.turn, lambda kind: self._follow_order(core, kind))
        links.close()

    def _obey(self, core: "EngineCore", kind: OrderKind) -> str | None:
        reason = super()._obey(core, kind)
        if reason is None and kind != "reset_prefix_cache" and self._links is not None:  # followers have no such cache
            self._links.steps.send(Obey(kind))
        return reason

    def _follow_order(self, core: Any, kind: OrderKind) -> None:
        """As the first rank of the group, which has answered already."""
        reason = super()._obey(core, kind)
        if reason is not None:
            logger.warning("rank %d cannot do what the first rank of its group did: %s", self._rank, reason)

    def _note_process(self, core: "EngineCore", message: Join | Leave) -> None:
        super()._note_process(core, message)
        if self._links is not None and self._rank == 0:
            self._links.tell_leaders(message)

    def _take_other(self, message: ToEngine) -> bool:
        if isinstance(message, Wake) and self._links is not None:
            self._links.agreement.wake(message.num_waits)
        return not isinstance(message, Shutdown)


def _is_of_collective(error: Exception) -> bool:
    """Whether torch.distributed raised it."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].startswith("torch.distributed")


def build_rank(setup: WorkerSetup, links: "RankLinks", phases: StartPhases) -> HasStats:
    """The core of a rank that schedules, or a rank that follows it; `phases` is the record of its start."""
    with resting_collector():
        from engine.core import EngineCore
        from engine.ranked_executor import Follower

    limit_threads(setup.config)
    if links.leads:
        return EngineCore(setup.config, ranks=links, phases=phases)
    return Follower(setup.config, links, phases=phases)


class PulseWatch(threading.Thread):
    """On hosts other than 0: ends this process when host 0 says so, or has said nothing for long."""

    def __init__(self, address: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self._address = address
        self._status = EXIT_LOST  # unless host 0 says that a setting is wrong

    def run(self) -> None:
        """Thread body."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(self._address)
        word = PULSE
        while word == PULSE:
            word = socket.recv() if socket.poll(int(_PULSE_LOST_S * 1000)) else PULSE_END
        os._exit(EXIT_SETTING if word == PULSE_SETTING else self._status)

    def wait_for_last_word(self, status: int) -> None:
        """This rank has failed with `status`, maybe because another cannot start: host 0 will know, and say so."""
        self._status = status
        self.join(_LAST_WORD_S)


def meet_host_0(setup: WorkerSetup, place: RankSetup) -> "tuple[WorkerSetup, RankMeeting, PulseWatch]":
    """On another host: returns when all ranks have met. What goes wrong is told here, since host 0 may not be there.

    Raises:
        SystemExit: something has.
    """
    try:
        from engine.rank_meeting import RankMeeting

        meeting = RankMeeting(setup.config, place)
        invitation = meeting.invitation()
        pulse = PulseWatch(invitation.pulse_address)
        pulse.start()
        meeting.meet(invitation)
    except Exception as error:
        if is_user_error(error):
            logger.error("%s", error)
        else:
            logger.exception("rank %d cannot meet the others", place.rank)
        raise SystemExit(EXIT_SETTING if is_wrong_setting(error) else EXIT_FAILED) from None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on this rank ends with host 0
    return msgspec.structs.replace(setup, outputs_address=invitation.outputs_address), meeting, pulse


def main(build: Build = build_rank) -> None:
    """Entry of the process; `build` makes what runs in its loop."""
    setup = read_setup()
    place, meeting, pulse = setup.place, None, None
    if place is None:
        raise RuntimeError("a rank needs a place among the others")
    if not setup.outputs_address:  # this is not host 0
        setup, meeting, pulse = meet_host_0(setup, place)
    worker = RankWorker(setup, place, meeting)
    dump_on_signal(worker.describe)
    status = worker.run_rank(build)
    if meeting is not None:
        meeting.close()
    if pulse is not None and status == EXIT_FAILED:
        pulse.wait_for_last_word(status)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
