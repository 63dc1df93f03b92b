"""The real service with the bundled model, and the means to run clients against it as programs of their own.

`openai` and curl belong to the development tools and run with every other test. The rest has the marker `clients`: a
JDK, and Python packages in virtual environments of their own, since their versions clash with ours.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODEL_FOLDER = ROOT / "assets" / "tiny-gpt-oss"
EXAMPLES = HERE / "examples"
PARIS = "What is the capital of France?"


@pytest.fixture(scope="session")
def url(bundled_url: str) -> str:
    """Address of the running service, without /v1."""
    return bundled_url


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run a program and return what it printed; its failure fails the test with all that it said."""
    environ = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "huggingface"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the internet
        "OPENAI_API_KEY": "none",
        "PATH": f"{ROOT / '.venv-clients' / 'current' / 'bin'}:{os.environ['PATH']}",  # for the examples in sh
    }

    def run_program(*command: str | Path, timeout_s: float = 300) -> str:
        process = subprocess.run(
            command, cwd=HERE, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    return run_program


def program(name: str, remedy: str) -> str:
    """Path of a program; a missing one fails the test and says how to get it."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: {remedy}")
    return found


def client_program(name: str, environment: str = "current") -> Path:
    """Path of a program in one of the clients' virtual environments."""
    path = ROOT / ".venv-clients" / environment / "bin" / name
    if not path.exists():
        pytest.fail(f"{path} is missing: run `make clients`, which makes that environment")
    return path
