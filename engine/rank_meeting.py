"""`RankMeeting`: how the ranks of several hosts find each other and agree, before they connect.

Rank 0 runs torch's TCPStore, under torchrun its agent does, and leaves an `Invitation` there: the addresses of its
parent's sockets, and the terms of its host. Every other rank waits for it; the first of each host compares its terms.
Then each claims its number with a socket that it holds open for as long as it lives: who claims a number that is taken
tries to connect there, so a process that has died, on whatever host, is in nobody's way. Once all numbers are claimed,
rank 0 says that the ranks have met.

The keys of the store are "invitation"; "rank/N", the address of the socket of rank N; "refusal", why the ranks cannot
work together; and "met".
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from itertools import groupby

import msgspec
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from engine.config import EngineConfig
from engine.errors import EngineConfigError, MachineError
from engine.messages import RankSetup
from engine.rank_terms import Terms, terms_of
from loaders.errors import LoadError
from loaders.phases import Phase, StartPhases

MEET_S = 1800.0  # hosts start at different times, and one may still pull its image
_SAY_S = 30.0
_POLL_S = 0.2
_ANSWER_S = 5.0

logger = logging.getLogger(__name__)


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """From rank 0 to ranks on other hosts: addresses of its parent's sockets, and what its host runs with."""

    outputs_address: str
    pulse_address: str
    terms: Terms


class Patience:
    """Waits for others, says now and then for whom, and gives up after `MEET_S` seconds."""

    def __init__(self, *, speaks: bool) -> None:
        """`speaks` is False where another rank of this host says the same."""
        self._speaks = speaks
        self._begin_s = self._said_s = time.monotonic()

    def wait(self, whom: Callable[[], str]) -> None:
        """Sleep for a moment. `whom` returns who is missing.

        Raises:
            MachineError: it has taken too long.
        """
        now_s = time.monotonic()
        if now_s - self._begin_s > MEET_S:
            raise MachineError(
                f"waited {MEET_S / 60:.0f} minutes for {whom()}: start all hosts, with the same master_addr and "
                "master_port, on a network where they reach each other"
            )
        if self._speaks and now_s - self._said_s > _SAY_S:
            self._said_s = now_s
            logger.info("waiting for %s, %.0f s so far", whom(), now_s - self._begin_s)
        time.sleep(_POLL_S)


def connect_store(place: RankSetup, *, speaks: bool = True) -> Store:
    """Where the ranks meet; under torchrun its agent may run the store. `speaks` as in `Patience`.

    Raises:
        MachineError: it cannot be reached, or its port is taken.
    """
    waits = place.store_fd is None and place.rank > 0
    if waits:
        logger.info(
            "rank %d meets the others at master_addr %s, master_port %d", place.rank, place.store_host, place.store_port
        )
    try:
        if distributed.is_torchelastic_launched():
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=MEET_S)))
        else:
            if waits:
                _await_listener(place, Patience(speaks=speaks))
            store = TCPStore(
                place.store_host,
                place.store_port,
                is_master=place.rank == 0,
                timeout=timedelta(seconds=MEET_S),
                wait_for_workers=False,
                master_listen_fd=place.store_fd,
            )
    except distributed.DistError as error:
        raise MachineError(
            f"master_addr is {place.store_host!r} and master_port {place.store_port}: rank {place.rank} cannot "
            f"{'listen' if place.rank == 0 else 'connect'} there: {str(error).splitlines()[0]}"
        ) from error
    return PrefixStore("moe-serve", store)


def own_host(place: RankSetup) -> str:
    """The IPv4 address under which this host reaches the store, and the others reach this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((place.store_host, place.store_port))
        return str(probe.getsockname()[0])


class RankMeeting:
    """One rank's part in the meeting. Its claim to the rank's number lasts until `close`."""

    def __init__(self, config: EngineConfig, place: RankSetup) -> None:
        """Waits for the store.

        Raises:
            MachineError: it cannot be reached, or its port is taken.
        """
        self._config, self._place = config, place
        self._rank = place.rank
        self._is_first = place.rank == config.local_ranks.start  # of its host
        self.store = connect_store(place, speaks=self._is_first)
        self._listener: socket.socket | None = None
        self._missed: set[int] = set()  # ranks that were there and could not be reached
        self._where = f"{place.store_host}, port {place.store_port}"

    def invitation(self) -> Invitation:
        """Rank 0 makes it, the others wait for it.

        Raises:
            MachineError: there is none within `MEET_S` seconds, or the store is lost.
            LoadError: the files of the model cannot be read.
        """
        if self._rank == 0:
            invitation = Invitation(
                outputs_address=self._place.outputs_address,
                pulse_address=self._place.pulse_address,
                terms=terms_of(self._config),
            )
            self.store.set("invitation", msgspec.json.encode(invitation).decode())
            return invitation
        try:
            patience = Patience(speaks=self._is_first)
            while not self.store.check(["invitation"]):
                patience.wait(lambda: f"rank 0 of moe-serve at {self._where}")
            return msgspec.json.decode(self.store.get("invitation"), type=Invitation)
        except distributed.DistError as error:
            raise self._lost() from error

    def meet(self, invitation: Invitation, phases: StartPhases | None = None) -> None:
        """Return when all ranks are here. In `phases` the phase `MEETING` counts those that are.

        Raises:
            EngineConfigError: this host does not fit host 0, or another host does not.
            LoadError: the files of the model cannot be read.
            MachineError: another process has this rank's number, others do not come, or the store is lost.
        """
        try:
            if self.store.check(["met"]):
                raise MachineError(
                    f"the ranks at {self._where} have met already, and another process is rank {self._rank}: is "
                    f"node_rank {self._config.node_rank} right? After a failure, start again when host 0 has ended"
                )
            if self._is_first and self._rank > 0:
                self._compare(invitation.terms)
            self._claim()
            self._await_all(phases)
        except BaseException as error:
            self.close()
            if isinstance(error, distributed.DistError):
                raise self._lost() from error
            raise

    def close(self) -> None:
        """Give up the claim to the rank's number."""
        if self._listener is not None:
            self._listener.close()

    def _compare(self, first: Terms) -> None:
        try:
            difference = terms_of(self._config).difference(first, self._config.node_rank)
            if difference is not None:
                raise EngineConfigError(difference)
        except (EngineConfigError, LoadError, OSError) as error:
            self.store.set("refusal", str(error))
            raise

    def _claim(self) -> None:
        self._listener = listener = socket.create_server((own_host(self._place), 0))
        listener.setblocking(False)
        self._own = msgspec.json.encode(listener.getsockname()).decode()
        self._hold_claim()

    def _hold_claim(self) -> None:
        """Make sure that this process has its rank's number: nobody had it, or a process that has died, or rank 0 has
        taken this one for dead.
        """
        before = ""
        while (holder := self.store.compare_set(f"rank/{self._rank}", before, self._own).decode()) != self._own:
            if _answers(holder):
                raise MachineError(
                    f"another process, at {_address(holder)[0]}, is rank {self._rank} already: is node_rank "
                    f"{self._config.node_rank} right?"
                )
            # Rank 0 may have deleted it meanwhile, which `compare_set` does not tell.
            before = holder if self.store.check([f"rank/{self._rank}"]) else ""

    def _await_all(self, phases: StartPhases | None) -> None:
        patience = Patience(speaks=self._is_first)
        everybody = range(self._config.num_ranks)
        while not self.store.check(["met"]):
            if self.store.check(["refusal"]):
                raise EngineConfigError(self.store.get("refusal").decode())
            if self._rank == 0:
                missing = self._missing(everybody) or self._release_dead()
                if phases is not None:
                    phases.wait_for(Phase.MEETING, len(everybody) - len(missing), self._describe(missing) or None)
                if not missing:
                    self.store.set("met", "")
                    return
            self._hold_claim()
            self._close_calls()
            patience.wait(lambda: self._describe(self._missing(everybody)) or "rank 0")

    def _close_calls(self) -> None:
        """Close the connections of those who tried whether this process lives, before too many wait for an answer."""
        with contextlib.suppress(BlockingIOError):
            while self._listener is not None:
                self._listener.accept()[0].close()

    def _missing(self, ranks: Collection[int]) -> list[int]:
        return [rank for rank in ranks if not self.store.check([f"rank/{rank}"])]

    def _release_dead(self) -> list[int]:
        """Ranks that cannot be reached, so that their process has died, or the network is wrong. Their numbers are free
        again, and one that lives claims its own anew.
        """
        keys = {rank: f"rank/{rank}" for rank in range(self._config.num_ranks) if rank != self._rank}
        dead = [rank for rank, key in keys.items() if not _answers(self.store.get(key).decode())]
        for rank in dead:
            if rank not in self._missed:
                logger.warning("%s was there, and cannot be reached any more", self._describe([rank]))
            self._missed.add(rank)
            self.store.delete_key(keys[rank])
        return dead

    def _describe(self, ranks: Collection[int]) -> str:
        """Such as "host 1 (rank 2, 3), host 2 (rank 5)"."""
        num_local = self._config.num_ranks // self._config.nnodes
        hosts = groupby(ranks, key=lambda rank: rank // num_local)
        return ", ".join(f"host {host} (rank {', '.join(map(str, of_host))})" for host, of_host in hosts)

    def _lost(self) -> MachineError:
        return MachineError(f"host 0 at {self._where} has ended, or cannot be reached any more")


def _await_listener(place: RankSetup, patience: Patience) -> None:
    """Until somebody listens where the ranks meet. Torch's store would wait, too, and fill the log with traces."""
    while True:
        try:
            socket.create_connection((place.store_host, place.store_port), timeout=_ANSWER_S).close()
            return
        except OSError as error:
            reason = str(os.strerror(error.errno) if error.errno and error.errno > 0 else error)
        patience.wait(partial(str, f"host 0 at {place.store_host}, port {place.store_port} ({reason})"))


def _answers(holder: str) -> bool:
    """Whether the process lives that listens there."""
    try:
        socket.create_connection(_address(holder), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def _address(holder: str) -> tuple[str, int]:
    return msgspec.json.decode(holder, type=tuple[str, int])
