"""Who gets a place when all are taken: one client's burst must not shut the others out."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from engine.admission import NoPlaceError, Places, choose_loser, is_within_share
from engine.config import EngineConfig
from engine.inlet import Inlet
from engine.link import EngineLink
from engine.messages import Abort, Add
from engine.validate import RequestLimits
from tests.engine.requests import request
from tests.engine.test_client import collect, is_idle, running, until
from tests.tables import rows

HOG, OTHER, NEW = ("hog", "h"), ("other", "o"), ("new", "n")


@rows(
    "holders, client, loser",
    ([HOG, HOG, HOG], "hog", None),
    ([HOG, HOG, HOG], "new", 2),
    ([HOG, OTHER, HOG, OTHER], "new", 3),
    ([HOG, HOG, OTHER, HOG], "new", 3),
    ([HOG, HOG, HOG, OTHER], "other", 2),
    ([HOG, HOG, OTHER, OTHER], "other", None),
    ([HOG, OTHER], "new", None),  # more clients than places: nobody has a share
)
def test_a_client_below_its_share_takes_the_youngest_place_of_who_holds_the_most(holders, client, loser):
    assert choose_loser([(path, False) for path in holders], client) == loser


def test_what_has_begun_keeps_its_place():
    assert choose_loser([(HOG, True), (HOG, False), (HOG, True)], "new") == 1
    assert choose_loser([(HOG, True), (HOG, True), (OTHER, False)], "new") is None


def test_nobody_can_take_a_place_back():
    """Three clients that never stop asking settle at equal shares after as few exchanges as that takes."""
    holders = [HOG] * 12
    num_exchanges = 0
    for _ in range(20):
        for path in (OTHER, NEW, HOG):
            loser = choose_loser([(each, False) for each in holders], path[0])
            if loser is not None:
                del holders[loser]
                holders.append(path)
                num_exchanges += 1
    assert sorted(holders) == [HOG] * 4 + [NEW] * 4 + [OTHER] * 4
    assert num_exchanges == 8


def test_a_share_counts_all_requests_at_once():
    assert is_within_share({"hog": 100}, "new", 50, 100)
    assert not is_within_share({"hog": 100}, "new", 51, 100)
    assert not is_within_share({"hog": 60, "new": 40}, "new", 11, 100)
    assert is_within_share({}, "new", 100, 100)


def ask(name, path, num_prompt=1):
    asked = request(name, [1] * num_prompt, 12, ignore_eos=True)
    return msgspec.structs.replace(asked, client=path[0], connection=path[1])


def test_a_burst_does_not_shut_others_out(monkeypatch):
    """Four places: two answers of the burst have begun and go on, the others make way; nothing is left behind."""

    async def main():
        async with running("slow", max_num_seqs=2, max_queued_requests=2) as client:
            await until(lambda: client.ready)
            sent, send = [], client._send
            monkeypatch.setattr(client, "_send", lambda message: (sent.append(message), send(message)))

            def start(name, path):
                return asyncio.create_task(collect(client, ask(name, path)))

            tasks = [start(f"h{i}", ("hog", f"c{i}")) for i in range(2)]
            await until(lambda: all(holder.has_begun for holder in client._places._holders.values()))
            tasks += [start(f"h{i}", ("hog", f"c{i}")) for i in range(2, 4)]
            tasks += [start(f"n{i}", ("new", f"d{i}")) for i in range(3)]
            tasks.append(start("h4", ("hog", "c4")))
            ends = [(await task)[-1] for task in tasks]
            assert [end.overloaded for end in ends] == [False, False, True, True, False, False, True, True]
            assert [end.finish_reason for end in ends if not end.overloaded] == ["length"] * 4
            assert [message.request_id for message in sent if isinstance(message, Abort)] == ["h3", "h2"]
            assert not client._inlets
            await until(lambda: is_idle(client.stats))

    asyncio.run(main())


def test_a_newcomer_goes_to_the_rank_where_another_lost_its_place(monkeypatch):
    """Rank 1 holds many more tokens, so it gets none while the router thinks that both are full."""
    config = EngineConfig(
        model=Path("m"),
        device="cpu",
        data_parallel_size=2,
        expert_parallel_size=2,
        max_num_seqs=1,
        max_queued_requests=1,
    )
    link = EngineLink(config, range(2), places=Places(4))
    monkeypatch.setattr(link, "_is_open", True)
    monkeypatch.setattr(link, "_limits", RequestLimits(vocab_size=100, max_model_len=600, num_kv_tokens=600))
    routes = {}

    def send(message):
        if isinstance(message, Add):
            routes[message.request.request_id] = link._router.choose(message.request)

    monkeypatch.setattr(link, "_send", send)
    for index, length in enumerate((10, 500, 10, 500)):
        link.submit(ask(f"h{index}", ("hog", f"c{index}"), length), Inlet(lambda output: None))
    link.submit(ask("n", NEW), Inlet(lambda output: None))
    assert routes == {"h0": 0, "h1": 1, "h2": 0, "h3": 1, "n": 1}


def test_the_answers_of_one_http_request_begin_together():
    """n = 2: the second waits, but the client has read from the first; another client's request is not marked."""
    places = Places(4)
    for name, path in (("o", OTHER), ("h", ("hog", "another connection")), ("h0", HOG), ("h1", HOG)):
        assert places.take(name, path) is None
    places.on_output("h0")
    places.free("h0")
    places.take("h2", ("hog", "another connection"))
    assert places.take("n", NEW) == "h2"
    assert places.take("n2", ("late", "l")) == "h"  # h1 keeps its place
    assert places.num_by_client == {"other": 1, "hog": 1, "new": 1, "late": 1}
    assert (places.num_taken, places.num_freed) == (7, 1)


def test_who_holds_no_more_than_a_share_cannot_push_others_out():
    places = Places(1)
    places.take("o", OTHER)
    with pytest.raises(NoPlaceError):
        places.take("n", NEW)
    places.free("o")
    places.free("o")
    assert places.take("n", NEW) is None
    assert (places.num_by_client, places.num_freed) == ({"new": 1}, 1)
