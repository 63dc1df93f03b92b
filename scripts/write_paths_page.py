"""Writes docs/paths.md from the registries that `--moe-backend auto` asks. Run it with `make pages`."""

from pathlib import Path

from moe import MoeA2ABackend
from moe.choose.explain import FORMATS, Row, explain
from moe.config import Activation, MoeRunnerConfig
from moe.geometry import ExpertShape
from moe.packages import SOURCES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "paths.md"
CARDS = {
    "CPU": "cpu",
    "A100": "sm80",
    "RTX 30": "sm86",
    "L4, L40S, RTX 40": "sm89",
    "H100, H200": "sm90",
    "B200, GB200": "sm100",
    "RTX 50": "sm120",
    "MI300X": "gfx942",
    "MI350": "gfx950",
}
_GPT_OSS = MoeRunnerConfig(
    shape=ExpertShape(num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880),
    activation=Activation(alpha=1.702, beta=1.0, limit=7.0),
    has_biases=True,
)
_DEEPSEEK = MoeRunnerConfig(shape=ExpertShape(num_experts=256, top_k=8, hidden_size=7168, intermediate_size=2048))
LAYERS = {name: (("GPT-OSS", _GPT_OSS) if name == "mxfp4" else ("DeepSeek-V3", _DEEPSEEK)) for name in FORMATS}
_HEAD = """# Choose a path

`make pages` writes this page from the code that chooses. A *path* is who computes the experts (`--moe-backend`), who
moves tokens between ranks (`--moe-a2a-backend`), and the number format of the experts. `--moe-backend auto`, the
default, takes the first backend of a cell whose package is installed; the others can be asked for by name. On one rank
the transport is `none`. *Measured* backends were the fastest in a record of that card; the others have a fixed order.

- Keep `auto`, unless you compare backends. On a GPU start once with `--tune`.
- `moe-serve explain --gpu h100 --format mxfp4` prints the same for your model, with the reason for every backend that
  cannot run it. `moe-serve doctor` says what this machine lacks. `moe-serve plan` says what fits into its memory.
- The README's table says which of these paths ran on their hardware, and which only met an emulated library.
"""


def paths_page() -> str:
    """The page: who can compute the experts of each format on each card, in the order of `auto`, and the packages."""
    parts = [_HEAD]
    for name, (model, config) in LAYERS.items():
        parts += [
            f"\n## {name}\n",
            f"Experts of {model}'s shape.\n",
            "| card | `auto` takes | then |",
            "| --- | --- | --- |",
        ]
        for card, arch in CARDS.items():
            usable = [row for row in explain(arch, name, MoeA2ABackend.NONE, config) if row.reason is None]
            parts.append(
                f"| {card} ({arch}) | {_first(usable)} | {', '.join(f'`{row.backend}`' for row in usable[1:])} |"
            )
    parts += ["\n## Packages\n", "| package | where to get it |", "| --- | --- |"]
    parts += [f"| `{package}` | {remedy} |" for package, remedy in sorted(SOURCES.items())]
    return "\n".join(parts) + "\n"


def _first(usable: list[Row]) -> str:
    if not usable:
        return "nothing can run it"
    return f"`{usable[0].backend}`" + (", measured" if str(usable[0].source).startswith("moe/tables/") else "")


if __name__ == "__main__":
    PAGE.write_text(paths_page())
