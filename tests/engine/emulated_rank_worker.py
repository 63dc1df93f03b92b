"""Process of one rank of the real engine and a real model; its transport and its expert library are emulated.

`EMULATED` in the environment says which, as `install` reads it: names of libraries separated by commas.
"""

import io
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from engine.rank_worker import main
from moe.device import Device
from tests.emulators import alltoall, deepep, low_latency, mori
from tests.emulators.aiter import install_aiter
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.deep_gemm import install_deep_gemm

VARIABLE = "EMULATED"
DEVICES = {"deep_gemm": "sm90", "cutedsl": "sm100", "aiter": "gfx950"}


class ProcessRank:
    """What the emulators need of a group, whose ranks are processes."""

    group_name = "experts"

    def __init__(self, group=None):
        self._group = group

    def rank(self):
        return distributed.get_rank(self._group)

    def size(self):
        return distributed.get_world_size(self._group)

    def exchange(self, value):
        """Everybody's value, in rank order."""
        packed, everybody = io.BytesIO(), [None] * self.size()
        torch.save(value, packed)  # pickle alone knows no FP8
        distributed.all_gather_object(everybody, packed.getvalue(), group=self._group)
        return [torch.load(io.BytesIO(each), weights_only=False) for each in everybody]


def between_processes(emulated, **changes):
    """The emulated class for a process group: its argument of that name, or the first one, becomes a `ProcessRank`."""

    def start(self, *args, **options):
        if "group" in options:
            options["group"] = ProcessRank(options["group"])
        else:
            args = (ProcessRank(args[0]), *args[1:])
        emulated.__init__(self, *args, **options)

    return type("Buffer", (emulated,), {"__init__": start, **changes})


def install(patch, names):
    """Emulate these libraries; "wide" lets fp32 pass where the kernels take bf16."""
    wide = {"wide": "wide" in names}
    deepep.install_deepep(patch)
    patch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=between_processes(deepep.Buffer, **wide)))
    patch.setitem(sys.modules, "mooncake", SimpleNamespace())
    for module, emulated in (
        ("mooncake.mooncake_ep_buffer", low_latency.MooncakeBuffer), ("nixl_ep", low_latency.NixlBuffer),
    ):  # fmt: skip
        patch.setitem(sys.modules, module, SimpleNamespace(Buffer=between_processes(emulated, **wide)))
    patch.setattr(mori, "this_rank", ProcessRank)
    patch.setattr(alltoall, "this_rank", ProcessRank)
    if "deep_gemm" in names:
        install_deep_gemm(patch)
    if "aiter" in names:
        install_aiter(patch)
        mori.install_mori(patch)
    if "cutedsl" in names:
        install_cutedsl(patch)
        alltoall.install_alltoall(patch)
        combine = alltoall.MoeAlltoAll.combine
        patch.setattr(  # the emulator does not round, so that tests see the sums
            alltoall.MoeAlltoAll,
            "combine",
            lambda self, x, *args, **options: combine(self, x, *args, **options).to(x.dtype),
        )
        patch.setattr(
            "flashinfer.comm.mnnvl.TorchDistBackend", between_processes(alltoall.TorchDistBackend)
        )  # fmt: skip
    for name in DEVICES.keys() & set(names):
        patch.setattr("moe.choose.select.probe_device", lambda device, arch=DEVICES[name]: Device(arch=arch))


if __name__ == "__main__":
    torch.set_num_threads(1)
    install(pytest.MonkeyPatch(), os.environ[VARIABLE].split(","))
    main()
