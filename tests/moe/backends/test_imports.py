"""What the backends and the emulated libraries may import."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_backends_answer_without_importing_flashinfer() -> None:
    code = (
        "import sys\n"
        "from moe import ExpertShape, MoeA2ABackend, MoeBackend, MoeRunnerConfig\n"
        "from moe.device import Device\n"
        "from moe.registry import load_backend\n"
        "shape = ExpertShape(num_experts=4, hidden_size=256, intermediate_size=256, top_k=2)\n"
        "config = MoeRunnerConfig(shape=shape)\n"
        "for name in [backend for backend in MoeBackend if backend.startswith('flashinfer')]:\n"
        "    load_backend(name).supports(Device(arch='sm90'), 'mxfp4', MoeA2ABackend.NONE, config)\n"
        "assert 'flashinfer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_emulators_import_neither_backends_nor_loaders() -> None:
    allowed = {"pytest", "torch", "flashinfer"} | sys.stdlib_module_names
    for path in (ROOT / "tests" / "emulators").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_allowed = name.split(".")[0] in allowed or name.startswith("tests.emulators")
                assert is_allowed, f"{path.name} imports {name}"
