"""What runs in threads of the service must not change what belongs to the whole process and back."""

import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loaders.checkpoint import Checkpoint
from moe.cpu.linear import make_linear

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "model", "loaders", "moe")


def test_no_package_swaps_the_filters_of_warnings():
    """`catch_warnings` puts back the filters of all threads: two at once can leave the wrong ones behind."""
    users = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "catch_warnings(" in path.read_text()
    ]
    assert users == []


def test_files_and_linear_layers_made_in_threads_leave_other_warnings_alone(tmp_path):
    for number in range(8):
        save_file({"w": torch.ones(64, 64)}, tmp_path / f"{number}.safetensors")
    failures = []

    def work(number):
        try:
            weight = Checkpoint.open(tmp_path / f"{number}.safetensors").view("w")
            make_linear(weight.clone(), None)(torch.ones(1, 64))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with pytest.raises(UserWarning, match="another"):  # the suite turns warnings into errors, here as before
        warnings.warn("another", stacklevel=1)
