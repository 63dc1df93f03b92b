"""The wheel: holds the packages, the page and the bundled model, nothing else; its command runs from any folder."""

import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from server.model_source import BUNDLED_MODELS

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "model", "loaders", "moe")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the checkout; needs no package index."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in (*PACKAGES, "assets"):
        shutil.copytree(ROOT / folder, source / folder, ignore=IGNORED)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"  # as pip calls it
    subprocess.run([sys.executable, "-c", build, out], cwd=source, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_wheel_holds_every_module_the_page_and_the_bundled_model_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    tables = {str(path.relative_to(ROOT)) for name in ("moe", "model") for path in (ROOT / name).rglob("*.json")}
    files = (path for name in BUNDLED_MODELS for path in (ROOT / "assets" / name).iterdir())
    bundled = {f"server/bundled/{path.relative_to(ROOT / 'assets')}" for path in files}
    page = {f"server/page/{path.name}" for path in (ROOT / "server/page").iterdir() if path.is_file()}
    assert names == sources | tables | bundled | page


def test_installed_command_runs_in_a_folder_with_packages_of_the_same_name(wheel: Path, tmp_path: Path) -> None:
    venv, folder = tmp_path / "venv", tmp_path / "elsewhere"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    libraries = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    # The dependencies of this environment, but not its editable install of the project: path files are not nested.
    (libraries / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    for name in ("model", "server"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('imported from the current folder')")
    shown = subprocess.run(
        [venv / "bin" / "moe-serve", "--help"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "--moe-backend" in shown.stdout
    code = "import server, sys; sys.exit(str(server.__file__).startswith(sys.prefix) is False)"
    subprocess.run([python, "-P", "-c", code], cwd=folder, check=True)
