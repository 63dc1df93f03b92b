"""Process of one rank of the real engine and a real model; its transport and its expert library are emulated.

`EMULATED` in the environment says which, as `install` reads it: a backend and a device, for example "aiter@gfx950".
"""

import io
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from engine.rank_worker import main
from tests.emulators import alltoall, deepep, low_latency, mori
from tests.engine import emulated_devices as devices

VARIABLE = "EMULATED"
WIDE = "wide"


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


def install(patch, emulated):
    """Emulate all transports, and the library that this backend calls on this device; "wide" in place of them lets fp32
    pass where the transports' kernels take bf16.
    """
    wide = {"wide": emulated == WIDE}
    deepep.install_deepep(patch)
    patch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=between_processes(deepep.Buffer, **wide)))
    patch.setitem(sys.modules, "mooncake", SimpleNamespace())
    for module, buffer in (
        ("mooncake.mooncake_ep_buffer", low_latency.MooncakeBuffer), ("nixl_ep", low_latency.NixlBuffer),
    ):  # fmt: skip
        patch.setitem(sys.modules, module, SimpleNamespace(Buffer=between_processes(buffer, **wide)))
    patch.setattr(mori, "this_rank", ProcessRank)
    patch.setattr(alltoall, "this_rank", ProcessRank)
    backend, _, arch = emulated.partition("@")
    if arch:
        devices.install(patch, backend, arch)
    if backend == "aiter":
        mori.install_mori(patch, arch)
    if backend == "flashinfer_cutedsl":
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


def run():
    """The body of a rank's process."""
    torch.set_num_threads(1)
    install(pytest.MonkeyPatch(), os.environ[VARIABLE])
    main()


if __name__ == "__main__":
    run()
