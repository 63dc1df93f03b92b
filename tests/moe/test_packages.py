"""G62: every message about a missing package says where the real one is; PyPI has strangers' projects of some names."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe.backend import Backend
from moe.backends import c_compiler
from moe.backends.flashinfer import common as flashinfer_common
from moe.backends.flashinfer.mxfp4 import FlashinferMxfp4Backend
from moe.backends.triton.backend import TritonBackend
from moe.config import MoeA2ABackend
from moe.dispatch.base import load_library
from moe.errors import UnsupportedPathError
from moe.packages import SOURCES, not_installed
from moe.registry import BACKEND_MODULES, load_backend
from tests.tables import rows

ROOT = Path(__file__).parents[2]
# What PyPI offers under these names is not what this project imports under them.
STRANGERS = ("deep_ep", "deep-ep", "deep_gemm", "deep-gemm", "aiter", "mooncake", "mori", "nixl_ep", "moe-serve")


def imported_late() -> set[str]:
    """Top packages that `moe` imports by a name in a string."""
    found = set()
    for path in (ROOT / "moe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "load_library"):
                found.add(str(node.args[0].value).partition(".")[0])
    return found - {"moe"}


def test_g62_every_optional_package_has_a_source() -> None:
    packages = {load_backend(backend).package for backend in BACKEND_MODULES} - {None}
    assert imported_late() | packages == set(SOURCES)


@rows("package", *SOURCES)
def test_g62_no_message_names_a_strangers_package_as_the_one_to_install(package: str) -> None:
    text = not_installed(package)
    assert text.startswith(f"the package {package}, which is not installed: ")
    installed = re.findall(r"pip install '?([\w-]+)", text)
    assert not set(installed) & set(STRANGERS)
    assert installed or re.search(r"install it from https://github\.com/[\w-]+/[\w-]+", text)


@rows("package", "deep_ep", "mori", "mooncake", "nixl_ep", "flashinfer")
def test_g62_a_transport_without_its_package_says_so(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedPathError) as caught:
        load_library(package, MoeA2ABackend.DEEPEP)
    assert str(caught.value) == f"--moe-a2a-backend deepep needs {not_installed(package)}"


def test_g62_no_file_or_extra_installs_a_strangers_package() -> None:
    """Also not this project's own name, which PyPI does not have: anyone could take it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    named = {re.split(r"[^\w-]", text)[0] for text in wanted}
    assert len(named) > 20
    assert not named & set(STRANGERS)
    patterns = ("moe/**/*.py", "server/**/*.py", "docs/*.md", "README.md", "Dockerfile", "Makefile")
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        for name in re.findall(r"pip install (?:-\S+ |\S+\.txt )*['\"]?([A-Za-z][\w-]*)", path.read_text()):
            assert name not in STRANGERS, f"{path}: pip install {name}"


# ---- what Triton and FlashInfer compile with at run time ----


def compiler(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "gcc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "gcc").chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH. What was found before is forgotten, and each time that `lacks` is asked."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("moe.backends.triton.backend.missing_for_triton", c_compiler.missing_for_triton.__wrapped__)
    return tmp_path / "bin"


def test_triton_needs_a_c_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "apt install gcc" in str(TritonBackend().lacks())
    compiler(path, "exit 0")
    assert TritonBackend().lacks() is None
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "CC is no-such-compiler, which cannot be run" in str(TritonBackend().lacks())


def test_triton_needs_pythons_headers(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(path, "echo 'main.c:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1")
    monkeypatch.setattr(c_compiler, "_include_folder", lambda: tmp_path)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"apt install python{version}-dev" in str(TritonBackend().lacks())
    (tmp_path / "Python.h").touch()
    compiler(path, "echo 'In file included' >&2; echo 'stdlib.h: fatal error: not found' >&2; exit 1")
    assert "says: stdlib.h: fatal error: not found" in str(TritonBackend().lacks())


def test_triton_without_its_package_asks_for_that_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "package", "flashinfer")
    monkeypatch.setattr(Backend, "is_installed", lambda self: False)
    assert TritonBackend().lacks() == not_installed("flashinfer")


@rows("toolkit, compiled, lacks", (False, False, True), (True, False, False), (False, True, False))
def test_flashinfer_needs_nvcc_unless_its_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toolkit: bool, compiled: bool, lacks: bool
) -> None:
    def cuda_path() -> str:
        if not toolkit:
            raise RuntimeError("Could not find nvcc")
        return str(tmp_path)

    modules = {
        "jit.env": SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path if compiled else tmp_path / "none"),
        "jit.cpp_ext": SimpleNamespace(get_cuda_path=cuda_path),
    }
    monkeypatch.setattr(flashinfer_common, "library", modules.__getitem__)
    assert ("CUDA 13 toolkit" in str(FlashinferMxfp4Backend().lacks())) is (lacks or toolkit)  # a toolkit without nvcc
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert (FlashinferMxfp4Backend().lacks() is not None) is lacks
