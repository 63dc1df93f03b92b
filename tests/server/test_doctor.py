"""`moe-serve doctor` on machines that lack something: each lack has its line, its level and its way out."""

import json
import shutil
import socket
import sysconfig
from pathlib import Path

import pytest

from engine.config import EngineConfig
from moe.config import MoeA2ABackend
from moe.packages import SOURCES, TRANSPORT_PACKAGES
from server import cli
from server.config import ServerConfig
from server.doctor import service
from server.doctor.command import doctor, examine
from server.doctor.finding import Level, is_well, render, verdict
from server.doctor.machine import Machine
from server.doctor.packages import Package, examine_packages
from tests.server.conftest import ASSETS
from tests.tables import rows

GIB = 1 << 30
NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.3.0"
SMI = """#!/bin/sh
case "$*" in
    *--query-gpu*) for gpu in 0 1; do echo "NVIDIA H200, 9.0, 143771, {used}"; done ;;
    "topo -m") printf '\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\t{link}\\t0-47\\nGPU1\\t{link}\\t X \\t0-47\\n' ;;
    *) echo "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: {cuda} |" ;;
esac
"""
TORCH = """
from types import SimpleNamespace
__version__ = "2.11.0"
def init():
    {init}
version = SimpleNamespace(cuda={built!r}, hip=None)
nccl = SimpleNamespace(version=lambda: {nccl})
cuda = SimpleNamespace(init=init, device_count=lambda: 2, get_device_capability=lambda _: (9, 0), nccl=nccl)
"""
CERTIFICATE = Path(__file__).parent / "localhost.pem"
HEADER = sysconfig.get_paths()["include"].lstrip("/") + "/Python.h"
PORT = "sys/class/infiniband/mlx5_0/ports/1"


class World:
    """A machine of two H200s where nothing is missing, until a test breaks it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.free, self.shm = 100 * GIB, 16 * GIB
        self.environ = {
            "PATH": f"{folder}/bin:/usr/bin:/bin", "PYTHONPATH": f"{folder}/packages", "HOME": "/home/me",
            "NVSHMEM_DIR": "/opt/nvshmem",
        }  # fmt: skip
        for path in ("dev/shm", "home/me", "opt/nvshmem"):
            (folder / path).mkdir(parents=True)
        for path in ("dev/nvidia0", "dev/nvidia1", "dev/infiniband/uverbs0"):
            self.write(path, "")
        self.write("proc/driver/nvidia/version", NVRM)
        self.write(f"{PORT}/state", "4: ACTIVE")
        self.write(f"{PORT}/rate", "400 Gb/sec (4X NDR)")
        self.limit("Max open files", "65536")
        self.write("bin/gcc", "")
        (self.root / "bin/gcc").chmod(0o755)
        self.write(HEADER, "")
        self.smi()
        self.torch()
        for name in SOURCES:
            self.package(name, "__version__ = '1.0'")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def remove(self, *paths: str) -> None:
        for path in paths:
            (self.root / path).unlink()

    def limit(self, name: str, value: str) -> None:
        self.write("proc/self/limits", f"Limit  Soft Limit  Hard Limit  Units\n{name:<26}{value:<21}{value:<21}files\n")

    def smi(self, used: int = 4, link: str = "NV18", cuda: str = "13.0", script: str = SMI) -> None:
        self.write(
            "bin/nvidia-smi", script.replace("{used}", str(used)).replace("{link}", link).replace("{cuda}", cuda)
        )
        (self.root / "bin/nvidia-smi").chmod(0o755)

    def torch(self, init: str = "pass", built: str | None = "13.0", nccl: str = "(2, 28, 9)") -> None:
        self.package("torch", TORCH.format(init=init, built=built, nccl=nccl))

    def package(self, name: str, source: str) -> None:
        self.write(f"packages/{name}.py", source)

    def lose(self, name: str) -> None:
        """As if a package that the tests' environment may have were not installed."""
        self.package(name, f"raise ModuleNotFoundError('no {name}', name='{name}')")

    @property
    def machine(self) -> Machine:
        return Machine(
            environ=self.environ, root=self.root, free_bytes=lambda _: self.free, total_bytes=lambda _: self.shm
        )

    def examine(self, *, downloads: bool = False, **settings):
        """The worst finding of each topic, without those of paths, which hold for the tests' own environment."""
        found = examine(self.machine, EngineConfig(model=Path(), **settings), downloads=downloads)
        order = list(Level)
        return {
            each.topic: each
            for each in sorted(found, key=lambda each: order.index(each.level))
            if not each.topic.startswith("--")
        }


@pytest.fixture(autouse=True)
def _paths_are_not_asked(monkeypatch, request):
    """Asking every backend what it lacks takes seconds, and is tested once, below."""
    if "paths" not in request.fixturenames:
        monkeypatch.setattr("server.doctor.command.path_findings", lambda *_: [])


def test_a_machine_that_lacks_nothing_is_well(tmp_path):
    found = World(tmp_path).examine(tensor_parallel_size=2, tune_cache_dir=Path("/home/me/tune"))
    assert {each.level for each in found.values()} == {Level.OK}
    texts = {topic: each.text for topic, each in found.items()}
    assert texts["driver"] == "NVIDIA 580.65.06"
    assert texts["GPUs"] == "2 x NVIDIA H200, 140.4 GiB, compute capability 9.0"
    assert texts["CUDA"] == "torch uses 13.0 and sees 2 GPUs; the driver serves up to 13.0"
    assert texts["NCCL"] == "2.28.9, in torch"
    assert texts["InfiniBand"] == "1 active ports, 400 Gb/sec (4X NDR)"


CUDA, TWO = {"device": "cuda"}, {"tensor_parallel_size": 2}
HOSTS = {"nnodes": 2, "master_addr": "a", "data_parallel_size": 2, "expert_parallel_size": 2}


def no_gpu(world):
    world.remove("dev/nvidia0", "dev/nvidia1", "proc/driver/nvidia/version")


def no_driver(world):
    no_gpu(world)
    world.write("sys/bus/pci/devices/0000:19:00.0/vendor", "0x10de")
    world.write("sys/bus/pci/devices/0000:19:00.0/class", "0x030200")


@rows(
    "broken, settings, level, topic, text, way_out",
    (no_gpu, {}, "note", "driver", "there is no GPU", ""),
    (no_gpu, CUDA, "problem", "driver", "there is no GPU", "without --device cuda"),
    (no_driver, {}, "warning", "driver", "1 NVIDIA GPUs are on the PCI bus", "install the NVIDIA driver"),
    (no_driver, CUDA, "problem", "driver", "1 NVIDIA GPUs are on the PCI bus", "install the NVIDIA driver"),
    (lambda w: w.remove("dev/nvidia0", "dev/nvidia1"), CUDA, "problem", "driver", "no /dev/nvidia0", "--gpus all"),
    (lambda w: w.remove("bin/nvidia-smi"), {}, "warning", "GPUs", "not on the PATH", "NVIDIA_DRIVER_CAPABILITIES"),
    (
        lambda w: w.smi(script="#!/bin/sh\necho 'Driver/library version mismatch' >&2\nexit 18"),
        CUDA, "problem", "GPUs", "Driver/library version mismatch", "restart the host",
    ),
    (lambda w: w.smi(used=90000), {}, "warning", "GPUs", "others hold 87.9 GiB of the memory of GPU ", "end their"),
    (lambda w: None, {"tensor_parallel_size": 4}, "problem", "GPUs", "4 ranks run on this host, which has 2", "lower"),
    (lambda w: w.torch(built=None), CUDA, "problem", "CUDA", "built without CUDA", "pip install torch"),
    (lambda w: w.torch(built=None), {}, "warning", "CUDA", "built without CUDA", "pip install torch"),
    (lambda w: w.smi(cuda="12.8"), CUDA, "problem", "CUDA", "built for CUDA 13.0", "update the driver"),
    (
        lambda w: w.torch(init="raise RuntimeError('Error 802: system not yet initialized')"),
        CUDA, "problem", "CUDA", "torch sees no GPU: Error 802", "nvidia-fabricmanager",
    ),
    (lambda w: w.smi(link="SYS"), TWO, "warning", "NVLink", "linked by SYS", "NVLink"),
    (lambda w: w.smi(link="SYS"), {}, "note", "NVLink", "linked by SYS", ""),
    (lambda w: w.torch(nccl="1 / 0"), TWO, "problem", "NCCL", "cannot be used: division by zero", "pip install torch"),
    (lambda w: w.package("torch", "raise OSError('libcudart.so.13: no such file')"), {}, "problem", "torch",
     "cannot be imported: libcudart.so.13", "install it again"),
    (lambda w: w.lose("torch"), {}, "problem", "torch", "is not installed", "pip install torch"),
    (lambda w: w.lose("triton"), {}, "warning", "triton", "is not installed", "pip install triton"),
    (lambda w: w.lose("flashinfer"), {}, "note", "flashinfer", "is not installed", "pip install flashinfer-python"),
    (lambda w: w.lose("flashinfer"), {"moe_backend": "flashinfer_mxfp4"}, "problem", "flashinfer", "is not", "pip"),
    (lambda w: w.lose("deep_ep"), {"moe_a2a_backend": "deepep"}, "problem", "deep_ep", "is not installed", "DeepEP"),
    (lambda w: w.package("flashinfer", "raise OSError(30, 'Read-only file system', '/home/me')"), {}, "warning",
     "flashinfer", "Read-only file system", "to a folder that can be written"),
    (lambda w: w.package("deep_ep", "import libmlx5"), {}, "warning", "deep_ep", "No module named 'libmlx5'", "again"),
    (lambda w: w.environ.update(NVSHMEM_DIR="/nowhere"), {"moe_a2a_backend": "deepep"}, "warning", "NVSHMEM",
     "/nowhere, which is no folder", "name the folder"),
    (lambda w: w.remove(f"{PORT}/state"), HOSTS, "warning", "InfiniBand", "no active port on mlx5_0", "ibstat"),
    (lambda w: w.remove("dev/infiniband/uverbs0"), HOSTS, "warning", "InfiniBand", "/dev/infiniband", "--device"),
    (lambda w: w.environ.update(CC="nowhere-cc"), {}, "problem", "C compiler", "CC names nowhere-cc", "apt"),
    (lambda w: w.environ.update(PATH=f"{w.root}/packages"), CUDA, "problem", "C compiler", "neither gcc nor", "apt"),
    (lambda w: w.remove(HEADER), {}, "problem", "C compiler", "no Python.h", "python3-dev"),
    (lambda w: w.limit("Max open files", "1024"), {}, "warning", "open files", "only 1024", "ulimit -n"),
    (lambda w: w.limit("Max open files", "64"), {}, "problem", "open files", "only 64", "ulimit -n"),
    (lambda w: w.limit("Max open files", "8192"), {}, "ok", "open files", "8192 may be open", ""),
    (lambda w: w.limit("Max open files", "8192"), {"max_num_seqs": 4096, "max_queued_requests": 6000}, "warning",
     "open files", "takes one: 10096 requests may run and wait", "ulimit -n"),
    (lambda w: w.limit("Max locked memory", "65536"), HOSTS | {"moe_a2a_backend": "deepep"}, "warning",
     "locked memory", "only 64.0 KiB", "memlock"),
    (lambda w: vars(w).update(shm=64 << 20), TWO, "warning", "shared memory", "64.0 MiB", "--shm-size"),
    (lambda w: vars(w).update(shm=64 << 20), {}, "ok", "shared memory", "64.0 MiB", ""),
    (lambda w: (w.root / "dev/shm").rmdir(), TWO, "problem", "shared memory", "no /dev/shm", "--shm-size"),
    (lambda w: w.write("home/me/.triton", ""), {}, "problem", "cache of Triton", "cannot", "TRITON_CACHE_DIR"),
    (lambda w: (w.write("home/me/.triton", ""), no_gpu(w), w.torch(built=None)), {}, "warning", "cache of Triton",
     "/home/me/.triton/cache cannot be written", "TRITON_CACHE_DIR"),
    (lambda w: w.write("home/me/.cache", ""), {"downloads": True}, "problem", "cache of the hub", "cannot", "HF_HUB"),
    (lambda w: vars(w).update(free=5 << 20), {}, "warning", "cache of the hub", "only 5.0 MiB are free", "larger disk"),
)  # fmt: skip
def test_what_is_broken_has_a_line_with_its_way_out(tmp_path, broken, settings, level, topic, text, way_out):
    world = World(tmp_path)
    broken(world)
    findings = world.examine(**settings)
    found = findings[topic]
    assert (str(found.level), text in found.text, way_out in found.way_out) == (level, True, True), found
    assert bool(found.way_out) == bool(way_out)
    assert is_well(findings.values()) == (level != "problem"), findings
    assert "\n" not in found.text + found.way_out


def test_a_package_that_ends_the_interpreter_is_named_and_the_others_are_examined(tmp_path):
    world = World(tmp_path)
    world.package("flashinfer", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    found = examine_packages(world.machine)
    assert found["flashinfer"].error == "the process that imported it was killed by signal 9"
    assert {name for name, each in found.items() if each.version is None} == {"flashinfer"}
    assert found.keys() == {"torch", *SOURCES}


def test_nothing_is_asked_of_gpus_on_a_cpu(tmp_path):
    world = World(tmp_path)
    no_driver(world)
    found = world.examine(device="cpu")
    assert found["driver"].text == "not needed with --device cpu"
    assert not found.keys() & {"GPUs", "CUDA", "NVLink"}


@pytest.fixture
def paths():
    """A test that asks for it gets what each path would need."""


def test_every_path_says_what_it_would_need_here(tmp_path, paths):
    world = World(tmp_path)
    world.lose("deep_ep")
    world.package("deep_gemm", "raise ImportError('libcuda.so')")
    config = EngineConfig(model=Path(), moe_a2a_backend="deepep", moe_backend="deep_gemm")
    found = {each.topic: each for each in examine(world.machine, config, downloads=False)}
    torch, deep_gemm, deepep = (
        found[topic] for topic in ("--moe-backend torch", "--moe-backend deep_gemm", "--moe-a2a-backend deepep")
    )
    assert (torch.level, torch.text) == (Level.OK, "nothing is missing; runs on any CPU or GPU")
    assert (deep_gemm.level, deep_gemm.text) == (Level.PROBLEM, "needs deep_gemm, which cannot be imported")
    assert deep_gemm.way_out == "its line above says why"
    assert (deepep.level, deepep.text) == (Level.PROBLEM, "needs the package deep_ep, which is not installed")
    assert deepep.way_out.startswith("install it from https://github.com/deepseek-ai/DeepEP")


@rows(
    "backend, settings, words",
    ("flashinfer_mxfp4", {"device": "cpu"}, "does not run on cpu; runs on SM90"),
    ("flashinfer_mxfp4", {}, None),
    ("flashinfer_trtllm", {}, "does not run on sm90; runs on SM100"),
    ("triton", {"device": "cpu"}, "does not run on cpu"),
    ("torch", {"device": "cpu"}, None),
)
def test_a_backend_that_cannot_run_on_the_device_is_a_problem(tmp_path, paths, backend, settings, words):
    config = EngineConfig(model=Path(), moe_backend=backend, **settings)
    findings = examine(World(tmp_path).machine, config, downloads=False)
    [found] = [each for each in findings if each.topic == f"--moe-backend {backend}"]
    assert ("does not run" in found.text) == (words is not None), found
    if words is not None:
        assert (found.level, words in found.text, "--moe-backend auto" in found.way_out) == (Level.PROBLEM, True, True)


@rows(
    "arch, settings, words",
    ("cpu", {}, None),
    ("sm90", {"moe_backend": "flashinfer_mxfp4"}, None),
    ("cpu", {"moe_backend": "flashinfer_mxfp4"}, "it runs on sm90, sm100, sm103. Usable for it: torch"),
    ("sm90", {"moe_backend": "deep_gemm"}, "format mxfp4 is not supported; it takes fp8_block"),
    ("cpu", {"tensor_parallel_size": 3}, "must divide the"),
    ("cpu", {"max_model_len": 1 << 30}, "max_model_len"),
)
def test_flags_that_do_not_fit_the_model_are_a_problem(arch, settings, words):
    found = service.flags(EngineConfig(model=ASSETS, **settings), arch)
    assert (found.level is Level.PROBLEM, (words or "fit the model") in found.text) == (words is not None, True), found
    assert bool(found.way_out) == (words is not None)


def test_a_certificate_is_looked_at(tmp_path):
    (tmp_path / "empty.pem").touch()
    assert service.http_findings(ServerConfig()) == []
    for file, level in ((CERTIFICATE, Level.OK), (tmp_path / "empty.pem", Level.PROBLEM)):
        [found] = service.http_findings(ServerConfig(ssl_certfile=file))
        assert (found.topic, found.level) == ("certificate", level), found


def test_the_last_line_names_what_needs_attention(tmp_path):
    world = World(tmp_path)
    fine = "the service can serve"
    assert verdict(world.examine().values()) == f"{fine}\n"
    world.limit("Max open files", "1024")
    assert verdict(world.examine().values()) == f"{fine}; warnings: open files\n"
    world.limit("Max open files", "64")
    assert verdict(world.examine().values()).endswith("cannot serve with these flags; problems: open files\n")


def test_without_torch_paths_are_not_asked(tmp_path, paths):
    world = World(tmp_path)
    world.lose("torch")
    found = examine(world.machine, EngineConfig(model=Path()), downloads=False)
    assert not [each for each in found if each.topic.startswith("--")]


def test_every_transport_names_its_package():
    assert TRANSPORT_PACKAGES.keys() == set(MoeA2ABackend) - {MoeA2ABackend.NONE}
    assert set(TRANSPORT_PACKAGES.values()) <= SOURCES.keys()


def test_the_command_prints_lines_or_json_and_its_status_says_whether_all_is_well(tmp_path, capsys):
    world = World(tmp_path)
    settings = cli.all_settings()
    assert doctor(["--port", "0"], "moe-serve", settings, world.machine, None) == 0
    text = capsys.readouterr().out
    assert "ok       driver" in text
    world.lose("torch")
    assert doctor(["--json"], "moe-serve", settings, world.machine, None) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["well"] is False
    [torch] = [each for each in shown["findings"] if each["topic"] == "torch"]
    assert torch["level"] == "problem"
    assert torch["way_out"].startswith("pip install torch")


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_port_that_is_taken_is_found(is_taken):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        if not is_taken:
            taken.close()
        found = service.port("127.0.0.1", number)
    words = ("cannot listen on", "stop what uses it") if is_taken else (f"127.0.0.1:{number} is free", "")
    assert (found.level is Level.PROBLEM, words[0] in found.text, words[1] in found.way_out) == (is_taken, True, True)


def test_an_address_of_another_machine_is_found():
    found = service.port("198.51.100.7", 0)
    assert (found.level, found.is_setting, "198.51.100.7:0" in found.text) == (Level.PROBLEM, False, True)


def truncate(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1000)


def rename_architecture(folder):
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("GptOssForCausalLM", "LlamaForCausalLM"))


@rows(
    "broken, words",
    (lambda folder: None, None),
    (lambda folder: (folder / "tokenizer.json").unlink(), "only tokenizer.json files are read"),
    (lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"), "cannot be compiled"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors files here"),
    (truncate, "the file is truncated"),
    (rename_architecture, "architecture 'LlamaForCausalLM' is unknown"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
)
def test_a_broken_checkpoint_is_found_without_reading_weights(tmp_path, broken, words):
    folder = shutil.copytree(ASSETS, tmp_path / "model", dirs_exist_ok=True)
    broken(folder)
    torch = Package(name="torch", version="2", facts={})
    found = service.model(EngineConfig(model=folder), torch)
    assert (found.level is Level.PROBLEM, words is None or words in found.text) == (words is not None, True), found
    shutil.rmtree(folder)


def test_a_line_holds_level_topic_text_and_way_out(tmp_path):
    world = World(tmp_path)
    world.limit("Max open files", "64")
    line = render([world.examine()["open files"]])
    assert line.startswith("problem  open files  only 64 may be open, and each connection takes one: 576 requests")
    assert "at once; ulimit -n 65536" in line
    assert line.count("\n") == 1


@rows(
    "argv, words",
    (["doctor", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    (["doctor", "--nnodes", "3"], "nnodes is 3"),
    (["doctor", "--model", "/nowhere"], "--model: '/nowhere' does not exist"),
)
def test_a_wrong_flag_is_refused(capsys, argv, words):
    assert cli.main(argv) == cli.USAGE_ERROR
    assert words in capsys.readouterr().err


def test_help_says_what_the_exit_status_means(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert "2 if flags or the files that they name do, else 1" in " ".join(capsys.readouterr().out.split())
