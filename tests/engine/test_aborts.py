"""Aborts at every moment: one last output each, and nothing is left behind (found by walking the engine's objects)."""

import gc
import random
from collections import deque

from engine.sequence import Sequence
from tests.engine.fakes import in_both_orders
from tests.engine.requests import request, run_all

BOUNDED = {  # by pages, places or buckets
    "_free", "_idle", "_references", "_kept", "_free_rows", "_page_of_key", "_key_of_page", "counts",
}  # fmt: skip


def growing_containers(root):
    """(path, container) of every dict, list, set or deque reachable through attributes of the engine's own objects."""
    found, queue, seen = [], deque([("core", root)]), set()
    while queue:
        path, item = queue.popleft()
        if id(item) in seen or not type(item).__module__.startswith("engine."):
            continue
        seen.add(id(item))
        names = getattr(item, "__dict__", None) or {
            name: getattr(item, name) for name in getattr(type(item), "__slots__", ()) if hasattr(item, name)
        }
        for name, value in names.items():
            if isinstance(value, dict | list | set | deque) and name not in BOUNDED:
                found.append((f"{path}.{name}", value))
            queue.append((f"{path}.{name}", value))
    return found


def assert_empty(core):
    containers = [(path, value) for path, value in growing_containers(core) if not path.endswith((".kv", ".info"))]
    assert {path.rsplit(".", 1)[1] for path, _ in containers} >= {"sequences", "_by_path", "running", "_early_outputs"}
    assert {path: len(value) for path, value in containers if len(value)} == {}
    assert core.stats().num_pages_used == 0
    gc.collect()
    assert not [item for item in gc.get_objects() if type(item) is Sequence]


@in_both_orders
def test_hundreds_of_aborts_leave_nothing(make_core):
    rng = random.Random(5)
    core = make_core(max_queued_requests=600)
    finals = {}
    for index in range(300):
        name = f"r{index}"
        core.add(
            request(name, [1 + index % 90] * (1 + index % 30), 50, presence_penalty=1.0, seed=index, temperature=1.0)
        )
        if index % 3:
            for output in core.step():
                if output.finish_reason:
                    finals.setdefault(output.request_id, []).append(output.finish_reason)
        victim = f"r{rng.randrange(index + 1)}"
        core.abort(victim)
        core.abort(victim)
    for index in range(300):
        core.abort(f"r{index}")
    for name, outputs in run_all(core).items():
        finals.setdefault(name, []).extend(output.finish_reason for output in outputs)
    assert len(finals) == 300
    assert all(len(reasons) == 1 for reasons in finals.values())
    assert {reasons[0] for reasons in finals.values()} >= {"abort", "stop"}
    assert_empty(core)


@in_both_orders
def test_finish_error_and_refusal_leave_nothing_either(make_core, monkeypatch):
    monkeypatch.setattr(
        "engine.executor.logger.disabled", True
    )  # a captured log record would hold the frames of the error
    core = make_core()
    core._runner.model.raise_on = 42
    run_all(core, [request("done", [1]), request("bad", [42]), request("refused", []), request("long", [1], 10**6)])
    core.abort("done")
    assert not core.has_work
    assert_empty(core)


@in_both_orders
def test_pages_are_free_in_the_step_after_an_abort(make_core):
    core = make_core()
    core.add(request("a", [1] * 20, 100, ignore_eos=True))
    core.step()
    core.step()
    assert core.stats().num_pages_used > 0
    core.abort("a")
    assert [output.finish_reason for output in core.step()] == ["abort"]
    assert (core.stats().num_pages_used, core.has_work) == (0, False)


@in_both_orders
def test_the_last_output_of_an_abort_counts_its_cached_tokens(make_core):
    core = make_core()
    run_all(core, [request("first", range(1, 30))])
    core.add(request("again", range(1, 30), 100, ignore_eos=True))
    core.step()
    core.abort("again")
    assert [(output.finish_reason, output.num_cached_tokens) for output in core.step()] == [("abort", 28)]
