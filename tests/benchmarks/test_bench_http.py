"""`bench_http` on a small scale: server, engine and clients work together, and a token has its cost."""

from benchmarks import bench_http


def test_every_token_is_streamed_and_has_a_cost():
    assert 0 < bench_http.measure("h11", num_streams=3, num_tokens=200, step_s=0.001) < 1e6
