"""`bench_http` on a small scale: server, engine and clients work together, and a token has its cost."""

import pytest

from benchmarks import bench_http


@pytest.mark.processes
@pytest.mark.parametrize("api_workers", [1, 2])
def test_every_token_is_streamed_and_has_a_cost(api_workers):
    run = bench_http.Run(protocol="h11", api_workers=api_workers)
    us_per_token, tokens_per_s = bench_http.measure(run, num_streams=3, num_tokens=60, step_s=0.001)
    assert 0 < us_per_token < 1e6
    assert 0 < tokens_per_s <= 3000
