"""`python -m tools.checkpoint_files gpt-oss-20b FOLDER [--full random | --sparse]`: a checkpoint to start a service on.

The names, shapes and dtypes are those of the published files. The tokenizer is the bundled model's, whose vocabulary is
smaller. Sizes can be cut for a quick look; `--layers` keeps a dense layer and one of experts where the model has both.
"""

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

from tools.checkpoint_files.deepseek import DeepseekV3
from tools.checkpoint_files.gpt_oss import GptOss
from tools.checkpoint_files.write import CheckpointFilesError, write_checkpoint

MODELS: dict[str, GptOss | DeepseekV3] = {
    "gpt-oss-20b": GptOss(layers=24, experts=32),
    "gpt-oss-120b": GptOss(layers=36, experts=128),
    "deepseek-v3": DeepseekV3(),
    "deepseek-v3-nvfp4": DeepseekV3(is_nvfp4=True),
}
_SIZES = ("layers", "experts", "hidden", "intermediate", "dense_intermediate", "heads", "vocab")


def main(argv: list[str] | None = None) -> int:
    """Write the folder and say how long that took; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.checkpoint_files", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--full", nargs="?", const="random", choices=("random",), help="write values to the disk")
    kind.add_argument("--sparse", action="store_true", help="headers only, with holes for the data (the default)")
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1), help="that write [%(default)s]")
    for name in _SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the published size")
    flags = parser.parse_args(argv)
    model = MODELS[flags.model]
    sizes = {name: getattr(flags, name) for name in _SIZES if getattr(flags, name) is not None}
    known = {field.name for field in dataclasses.fields(model)}
    for name, size in sizes.items():
        if name not in known or size < 1:
            parser.error(f"--{name.replace('_', '-')} {size}: " + ("at least 1" if size < 1 else "not in this model"))
    start_s = time.monotonic()
    try:
        num_bytes = write_checkpoint(
            dataclasses.replace(model, **sizes), flags.folder, is_full=flags.full is not None, num_threads=flags.threads
        )
    except (CheckpointFilesError, OSError) as error:
        print(f"checkpoint_files: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - start_s
    how = f"written at {num_bytes / 1e9 / seconds:.1f} GB/s" if flags.full else "sparse"
    print(f"{flags.folder}: {flags.model}, {num_bytes / 1e9:.1f} GB, {how} in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
