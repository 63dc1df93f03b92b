"""The figures of a run, exactly."""

from array import array

import numpy as np

from server.bench.load import Record, Share
from server.bench.processes import ProcessResult, RunResult
from server.bench.report import command_of, results
from server.bench.summary import Latency, summarize, token_gaps, tokens_per_second
from tests.tables import rows


def record(start_s, times, counts, end_s, **more):
    fields = {"prompt_tokens": 10, "output_tokens": sum(counts), "counting": "per chunk", **more}
    return Record(start_s, end_s, array("d", times), array("L", counts), **fields)


def test_percentiles_are_interpolated_linearly():
    latency = Latency.of([i / 1000 for i in range(1001)])  # 0 to 1000 ms
    assert latency.as_dict() == {
        "count": 1001, "mean": 500, "p50": 500, "p90": 900, "p99": 990, "p99.9": 999, "max": 1000,
    }  # fmt: skip
    assert Latency.of([0.001, 0.003]).as_dict() == {
        "count": 2, "mean": 2, "p50": 2, "p90": 2.8, "p99": 2.98, "p99.9": 2.998, "max": 3,
    }  # fmt: skip
    one = Latency.of([0.25]).as_dict()
    assert set(one.values()) == {1, 250}
    assert Latency.of([]) is None


def test_a_gap_is_divided_among_the_tokens_of_its_chunk():
    gaps = token_gaps([record(0, [1, 2, 5], [4, 1, 3], 5), record(0, [7], [2], 8), record(0, [], [], 1)])
    assert gaps.tolist() == [1, 1, 1, 1]
    assert token_gaps([]).tolist() == []
    assert token_gaps([record(0, [1, 2, 2.5], [1, 1, 1], 3)]).tolist() == [1, 0.5]


def test_the_figures_of_a_run():
    run = RunResult(
        100.0,
        [
            ProcessResult(
                [
                    record(100, [101, 102, 104], [1, 1, 2], 105),
                    record(101, [], [], 102, error="HTTP 500", detail="first", prompt_tokens=None),
                    record(109, [109.5], [1], 110, is_cut=True),
                ],
                cpu_s=2.0,
                wall_s=10.0,
            ),
            ProcessResult(
                [
                    record(100.5, [102.5, 103.5], [1, 1], 103.5, counting="usage", output_tokens=5),
                    record(102, [103], [1], 103, error="HTTP 500", detail="second"),
                    record(109.9, [], [], 110, is_cut=True, prompt_tokens=None),  # still in the queue
                ],
                cpu_s=7.5,
                wall_s=10.0,
            ),
        ],
    )
    summary = summarize(run)
    assert (summary.num_finished, summary.num_failed, summary.num_cut) == (2, 2, 2)
    assert {kind: (each.count, each.example) for kind, each in summary.failures.items()} == {"HTTP 500": (2, "first")}
    assert (summary.output_tokens, summary.prompt_tokens, summary.counting) == (4 + 5 + 1, 30, "usage")
    figures = results(summary)
    assert figures["output_tokens_per_s"] == 1.0
    assert figures["prompt_tokens_per_s"] == 3.0
    assert figures["requests_per_s"] == 0.2
    latencies = figures["latencies_ms"]
    assert (latencies["ttft"]["count"], latencies["ttft"]["p50"], latencies["ttft"]["max"]) == (3, 1000, 2000)
    assert (latencies["itl"]["count"], latencies["itl"]["mean"]) == (4, 1000)
    assert (latencies["tpot"]["count"], latencies["tpot"]["p50"]) == (2, 625)  # 3 s / 3 tokens and 1 s / 4
    assert (latencies["e2e"]["count"], latencies["e2e"]["max"]) == (2, 5000)
    assert summary.void_reasons == ["client process 1 used 75% of a core (limit 70%): use more --processes"]


def test_a_run_without_usage_and_one_in_which_everything_failed():
    run = RunResult(0.0, [ProcessResult([record(0, [1], [1], 2, prompt_tokens=None, counting="chunks")], 0.1, 2.0)])
    figures = results(summarize(run))
    assert (figures["prompt_tokens"], figures["prompt_tokens_per_s"]) == (None, None)
    assert figures["token_counting"] == "chunks"
    run = RunResult(0.0, [ProcessResult([record(0, [], [], 1, error="timeout", prompt_tokens=None)], 0.0, 1.0)])
    figures = results(summarize(run))
    assert set(figures["latencies_ms"].values()) == {None}
    assert (figures["requests_finished"], figures["output_tokens"]) == (0, 0)


def test_tokens_in_each_second():
    run = RunResult(100.0, [ProcessResult([], 0.0, 2.5)])
    totals = tokens_per_second(run, [record(100, [100.2, 101.9, 102.4], [1, 2, 3], 103)])
    assert np.array_equal(totals, [1, 2])  # the third second was not over
    short = RunResult(100.0, [ProcessResult([], 0.0, 0.5)])
    assert np.array_equal(tokens_per_second(short, [record(100, [100.2], [7], 100.4)]), [7])


def test_every_request_belongs_to_one_process():
    for num_processes in (1, 3, 8):
        shares = [Share(index, num_processes) for index in range(num_processes)]
        assert sorted(number for share in shares for number in share.numbers(20)) == list(range(20))
        assert sum(share.part_of(20) for share in shares) == 20


@rows("argv", ["--api-key", "s3cret", "--seed", "1"], ["--api-key=s3cret", "--seed", "1"])
def test_the_command_in_the_document_hides_the_key(argv):
    command = command_of(argv)
    assert "s3cret" not in command
    assert command.startswith("moe-serve bench --api-key")
    assert command.endswith("--seed 1")
