"""G60: constraints.txt pins one version of every package. `make pins` resolves them; here is what it calls a fault."""

from pathlib import Path

from scripts.check_pins import faults, pins

LINES = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()


def test_g60_every_line_is_one_exact_pin() -> None:
    lines = [line for line in LINES if line and not line.startswith("#")]
    assert len(pins(lines)) == len(lines), "a package stands twice, or a line is no pin"


def test_g60_a_missing_pin_and_one_that_nothing_asks_for_are_named() -> None:
    pinned = pins(["# a comment with a==1", "types-PyYAML==6", "old_package==1", "torch==2"])
    assert faults(pinned, pins(["types-pyyaml==6", "torch==2", "New.Package==3"])) == [
        "pin it: new-package==3",
        "nothing asks for it: old-package",
    ]
    assert faults(pinned, pinned) == []


def test_g60_the_cuda_libraries_of_torch_are_pinned_too() -> None:
    pinned = pins(LINES)
    assert {"triton", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "cuda-toolkit"} <= pinned.keys()
