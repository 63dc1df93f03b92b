"""`python -m tools.tiny_models {tokenizer,train,evaluate,export} --family ...`: the recipe of the bundled models."""

import argparse
import sys

from tools.tiny_models import evaluate, export, train, train_tokenizer

COMMANDS = {"tokenizer": train_tokenizer, "train": train, "evaluate": evaluate, "export": export}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_models", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=(module.__doc__ or "").splitlines()[0], description=module.__doc__, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].main(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"tiny_models: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
