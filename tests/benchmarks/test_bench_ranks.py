"""`benchmarks/bench_ranks.py` measures what it says: steps of one rank, and of several that meet."""

import json

import pytest

from benchmarks import bench_ranks


@pytest.mark.ranks
def test_all_layouts_are_measured(tmp_path, capsys):
    bench_ranks.main(["--ranks", "2", "--sequences", "4", "--tokens", "40", "--rounds", "1", "--out", str(tmp_path)])
    [last] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "ranks_cpu.json").read_text())["runs"] == [last]
    assert last["pack_256_us"] > 0
    for layout in ("one rank", "one rank, a share"):
        assert last[layout]["meeting_us"] == last[layout]["agreement_us"] == 0
    for layout in ("tp", "dp", "dp, all on each"):
        assert min(last[layout][key] for key in ("period_us", "meeting_us", "agreement_us", "cpu_us", "client_us")) > 0
