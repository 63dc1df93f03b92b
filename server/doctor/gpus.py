"""GPUs: their driver, what torch makes of them, NVLink between them, and InfiniBand to other hosts."""

import re
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.units import size_text
from server.doctor.finding import Finding, Level, ok
from server.doctor.machine import Machine
from server.doctor.packages import Package

_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a vendor and a class of PCI devices
_MIB = 1 << 20
_NVRM = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
_CUDA = re.compile(r"CUDA Version\s*:\s*(\d+)\.(\d+)")
_QUERY = "--query-gpu=name,compute_cap,memory.total,memory.used"
_NUM_FIELDS = 4


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as nvidia-smi lists it; sizes in bytes."""

    name: str
    capability: str
    memory_bytes: int
    used_bytes: int


def severity(config: EngineConfig) -> Level:
    """How bad it is if the GPUs cannot be used: with `--device auto` the service would go on, on the CPU."""
    return Level.PROBLEM if config.device.startswith("cuda") else Level.WARNING


def gpu_findings(machine: Machine, config: EngineConfig, torch: Package) -> list[Finding]:
    """Driver, GPUs, CUDA and NVLink. Without a GPU there is one finding, which `--device cuda` makes a problem."""
    if config.device == "cpu":
        return [ok("driver", "not needed with --device cpu")]
    found = _driver(machine, config)
    if found.level is not Level.OK or not machine.find("dev/nvidia[0-9]*"):
        return [found]
    outcome = machine.run("nvidia-smi", _QUERY, "--format=csv,noheader,nounits")
    if outcome is None:
        way_out = "install it, or in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        text = "nvidia-smi is not on the PATH, so nothing is known of the GPUs and NVLink"
        return [
            found,
            Finding(topic="GPUs", level=Level.WARNING, text=text, way_out=way_out),
            _cuda(None, config, torch),
        ]
    if outcome.status != 0:
        way_out = "if the driver was updated, restart the host; else see what dmesg says about NVRM"
        text = f"nvidia-smi fails: {outcome.words}"
        return [found, Finding(topic="GPUs", level=severity(config), text=text, way_out=way_out)]
    cards = _read_cards(outcome.out)
    plain = machine.run("nvidia-smi")
    versions = None if plain is None else _CUDA.search(plain.out)
    newest = None if versions is None else (int(versions[1]), int(versions[2]))
    return [found, *_cards(cards, config), _cuda(newest, config, torch), _nvlink(machine, len(cards), config)]


def _driver(machine: Machine, config: EngineConfig) -> Finding:
    """The driver in the kernel, and whether its devices are here: a container may lack them."""
    if machine.find("dev/kfd"):
        return ok("driver", f"amdgpu {machine.read('sys/module/amdgpu/version') or 'of the kernel'}")
    version = machine.read("proc/driver/nvidia/version")
    num_cards = sum(
        (machine.read(f"{folder}/vendor"), (machine.read(f"{folder}/class") or "")[:4]) == (_NVIDIA, _DISPLAY)
        for folder in (each.relative_to(machine.root) for each in machine.find("sys/bus/pci/devices/*"))
    )
    if version is None and not num_cards:
        if severity(config) is Level.PROBLEM:
            text, way_out = "there is no GPU here", f"run on a host with one, or without --device {config.device}"
            return Finding(topic="driver", level=Level.PROBLEM, text=text, way_out=way_out)
        return Finding(topic="driver", level=Level.NOTE, text="there is no GPU here; the service runs on the CPU")
    if version is None:
        text = f"{num_cards} NVIDIA GPUs are on the PCI bus, but no driver is loaded"
        way_out = "install the NVIDIA driver, or load it: modprobe nvidia"
        return Finding(topic="driver", level=severity(config), text=text, way_out=way_out)
    number = _NVRM.search(version)
    text = f"NVIDIA {number[1] if number else version.splitlines()[0]}"
    if not machine.find("dev/nvidia[0-9]*"):
        text += " is loaded, but there is no /dev/nvidia0"
        way_out = "give the container its GPUs: docker run --gpus all, or nvidia.com/gpu in Kubernetes"
        return Finding(topic="driver", level=severity(config), text=text, way_out=way_out)
    return ok("driver", text)


def _read_cards(table: str) -> list[Card]:
    """The rows of nvidia-smi's answer to `_QUERY`; sizes are in MiB, or [N/A] where memory is the host's."""
    rows = [[field.strip() for field in line.split(",")] for line in table.splitlines() if line.strip()]
    sizes = [[int(text) * _MIB if text.isdigit() else 0 for text in row[2:]] for row in rows]
    return [Card(row[0], row[1], *size) for row, size in zip(rows, sizes, strict=True) if len(row) == _NUM_FIELDS]


def _cards(cards: list[Card], config: EngineConfig) -> list[Finding]:
    """What there is, whether the ranks of this host fit onto it, and memory that others hold."""
    kinds = {f"{each.name}, {size_text(each.memory_bytes)}, compute capability {each.capability}" for each in cards}
    findings = [ok("GPUs", f"{len(cards)} x {' and '.join(sorted(kinds))}")]
    num_ranks = len(config.local_ranks)
    if num_ranks > len(cards) and not config.device.startswith("cuda:"):
        text = f"{num_ranks} ranks run on this host, which has {len(cards)} GPUs"
        way_out = "lower --tensor-parallel-size or --data-parallel-size, or raise --nnodes"
        findings = [Finding(topic="GPUs", level=Level.PROBLEM, text=text, way_out=way_out)]
    for number, card in enumerate(cards):
        if card.used_bytes > (1 - config.gpu_memory_utilization) * card.memory_bytes > 0:
            findings.append(
                Finding(
                    topic="GPUs",
                    level=Level.WARNING,
                    text=f"others hold {size_text(card.used_bytes)} of the memory of GPU {number}",
                    way_out="end their processes, or lower --gpu-memory-utilization",
                )
            )
    return findings


def _cuda(newest: tuple[int, int] | None, config: EngineConfig, torch: Package) -> Finding:
    """Whether torch can use the driver: `newest` is the newest CUDA version that it serves, None if not known."""
    built, error = torch.facts.get("cuda"), torch.facts.get("gpu_error")
    level = severity(config)
    if torch.version is None:
        return Finding(topic="CUDA", level=level, text="not known until torch can be imported")
    if built is None:
        text = "this torch was built without CUDA"
        way_out = "pip install torch from https://download.pytorch.org/whl/cu130, or the index of your CUDA version"
        return Finding(topic="CUDA", level=level, text=text, way_out=way_out)
    if newest is not None and int(built.partition(".")[0]) > newest[0]:
        text = f"torch was built for CUDA {built}, and the driver serves at most {newest[0]}.{newest[1]}"
        way_out = f"update the driver, or install a torch for CUDA {newest[0]}"
        return Finding(topic="CUDA", level=level, text=text, way_out=way_out)
    if error is not None or not torch.facts.get("num_gpus"):
        text = f"torch sees no GPU: {error or 'it found none'}"
        way_out = "see whether CUDA_VISIBLE_DEVICES hides them, and with NVSwitch whether nvidia-fabricmanager runs"
        return Finding(topic="CUDA", level=level, text=text, way_out=way_out)
    serves = "" if newest is None else f"; the driver serves up to {newest[0]}.{newest[1]}"
    return ok("CUDA", f"torch uses {built} and sees {torch.facts['num_gpus']} GPUs{serves}")


def _nvlink(machine: Machine, num_cards: int, config: EngineConfig) -> Finding:
    """Whether every two GPUs are linked directly, by the matrix that nvidia-smi prints."""
    if num_cards == 1:
        return ok("NVLink", "not needed by one GPU")
    outcome = machine.run("nvidia-smi", "topo", "-m")
    lines = [] if outcome is None else [line.split() for line in outcome.out.splitlines()]
    rows = [line[1 : num_cards + 1] for line in lines if "X" in line and line[0].startswith("GPU")]
    slow = sorted({link for row in rows for link in row if link != "X" and not link.startswith("NV")})
    if len(rows) == num_cards and not slow:
        return ok("NVLink", "between every two GPUs")
    text = f"some GPUs are linked by {', '.join(slow)}" if slow else "nvidia-smi topo -m does not say"
    if len(config.local_ranks) == 1:
        return Finding(topic="NVLink", level=Level.NOTE, text=f"{text}; only several ranks need it")
    way_out = "give the ranks GPUs with NVLink, else their sums go through the host"
    return Finding(topic="NVLink", level=Level.WARNING, text=text, way_out=way_out)


def infiniband(machine: Machine, config: EngineConfig) -> Finding:
    """Adapters that other hosts are reached through, and whether this process may use them."""
    level = Level.WARNING if config.nnodes > 1 else Level.NOTE
    ports = [each.relative_to(machine.root) for each in machine.find("sys/class/infiniband/*/ports/*")]
    if not ports:
        text = "there is no adapter; only several hosts need one"
        way_out = "without one NCCL uses TCP, and DeepEP works inside one host only" if config.nnodes > 1 else ""
        return Finding(topic="InfiniBand", level=level, text=text, way_out=way_out)
    states = {str(port): machine.read(f"{port}/state") or "" for port in ports}
    rates = {machine.read(f"{port}/rate") or "of unknown rate" for port in ports if "ACTIVE" in states[str(port)]}
    down = [path.split("/")[3] for path, state in states.items() if "ACTIVE" not in state]
    if not rates or (down and config.nnodes > 1):
        text = f"no active port on {', '.join(sorted(set(down)))}"
        return Finding(
            topic="InfiniBand", level=level, text=text, way_out="see ibstat, the cables and the subnet manager"
        )
    if not machine.find("dev/infiniband/uverbs*"):
        text, way_out = "adapters are here, but not /dev/infiniband", "docker run --device=/dev/infiniband"
        return Finding(topic="InfiniBand", level=level, text=text, way_out=way_out)
    return ok("InfiniBand", f"{len(ports) - len(down)} active ports, {', '.join(sorted(rates))}")
