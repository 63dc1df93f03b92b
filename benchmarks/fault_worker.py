"""Engine process with the fault that the variable PLANTED_FAULT names; none if it is empty."""

import os
from contextlib import ExitStack

from benchmarks.planted import FAULTS
from engine.worker import main

if __name__ == "__main__":
    with ExitStack() as planted:
        if name := os.environ["PLANTED_FAULT"]:
            planted.enter_context(FAULTS[name][1]())
        main()
