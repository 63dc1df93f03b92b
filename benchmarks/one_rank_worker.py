"""The process of a single rank for `bench_ranks`, to compare with."""

from benchmarks.ranks_worker import build
from engine.worker import main

if __name__ == "__main__":
    main(lambda setup, phases: build(setup, None, phases))
