"""Scheduling ranks agree before every step: what they say, how it travels, and how they wait."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.agreement import Agreement, Word
from engine.word_link import RanksLostError, WordLink


def linked(size):
    """The links of `size` ranks in one process."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    addresses = [listener.getsockname() for listener in listeners]
    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(WordLink.connect, listeners[i], addresses[:i], size - 1 - i) for i in range(size)]
        return [job.result(10) for job in jobs]


class Ring:
    """Agreements of several ranks, each in a thread."""

    def __init__(self, size):
        self.woken = []
        self.links = linked(size)
        self.agreements = [
            Agreement(link.max_over_ranks, lambda num_waits, rank=rank: self.woken.append((rank, num_waits)))
            for rank, link in enumerate(self.links)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for link in self.links:
            link.close()

    def agree(self, *words):
        with ThreadPoolExecutor(len(words)) as pool:
            results = list(pool.map(Agreement.agree, self.agreements, words, timeout=10))
        assert len({repr(result) for result in results}) == 1
        return results[0]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_hears_the_words_of_its_turn_when_others_are_ahead(size):
    links = linked(size)
    heard = [[] for _ in links]

    def run(rank):
        for turn in range(200):
            heard[rank].append(links[rank].max_over_ranks([10 * turn + rank, -turn, int(rank == turn % size)]))
        links[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert heard == [[[10 * turn + size - 1, -turn, 1] for turn in range(200)]] * size


@pytest.mark.parametrize("has_unread_words", [False, True])
def test_a_rank_whose_peer_is_gone_is_told(has_unread_words):
    first, second = linked(2)
    if has_unread_words:  # then the system resets the connection
        first._connections[0].sendall(b"1")
    second.close()
    with pytest.raises(RanksLostError, match="has ended"):
        first.max_over_ranks([1, 2, 3])
    first.close()


def test_ranks_agree_on_the_largest_step_on_decoding_and_on_stopping():
    with Ring(2) as ring:
        agreed = ring.agree(Word(num_tokens=5), Word())
        assert (agreed.max_rank_tokens, agreed.all_ranks_decode, agreed.stops) == (5, True, False)
        agreed = ring.agree(Word(num_tokens=5), Word(num_tokens=9, decodes=False))
        assert (agreed.max_rank_tokens, agreed.all_ranks_decode, agreed.stops) == (9, False, False)
        assert ring.agree(Word(), Word(stops=True)).stops


def test_a_rank_wakes_the_others_once_and_a_late_call_wakes_nobody():
    with Ring(2) as ring:
        first, second = ring.agreements
        assert first.is_waiting
        second.wake(0)
        assert not second.is_waiting
        ring.agree(Word(num_tokens=1), Word())
        assert ring.woken == [(0, 0)]  # the second had been woken
        ring.agree(Word(num_tokens=1), Word())
        assert ring.woken == [(0, 0)]  # both were awake
        ring.agree(Word(), Word())
        assert first.is_waiting
        assert second.is_waiting
        second.wake(0)  # of the wait before
        assert second.is_waiting
        second.wake(1)
        assert not second.is_waiting


def test_a_single_scheduler_agrees_with_itself():
    agreement = Agreement(None, lambda num_waits: None)
    assert agreement.agree(Word(num_tokens=3)).max_rank_tokens == 3
    assert not agreement.is_waiting
    agreement.agree(Word())
    assert agreement.is_waiting
