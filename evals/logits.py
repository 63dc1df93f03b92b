"""Compares the next-token distributions of two servers: top-1 agreement, and KL divergence from below."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from evals import texts
from evals.client import Client, add_server_arguments, make_client
from evals.distributions import Scores, difference, score
from evals.files import check_can_write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this comparison."""
    add_server_arguments(parser, one_server=False)
    parser.add_argument("--a", required=True, metavar="URL|FILE", help="base URL, or scores that --save wrote")
    parser.add_argument("--b", metavar="URL", help="base URL; left out, A is only scored")
    add_text_arguments(parser)
    parser.add_argument("--save", type=Path, help="file to write A's scores to, for a later --a")


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which tokens are scored."""
    parser.add_argument("--text", type=Path, help="file to score; default: bundled questions with the server's answers")
    parser.add_argument("--window", type=int, default=512, help="tokens of the text that are scored together [512]")
    parser.add_argument("--questions", type=int, default=60, help="bundled questions, without --text [60]")


def sequences(client: Client, args: argparse.Namespace) -> tuple[list[texts.Sequence], int]:
    """What those flags ask for, and the number of bytes of the text, 0 where there is none."""
    if args.text is not None:
        return texts.from_file(client, args.text, args.window)
    return texts.from_questions(client, args.questions, args.concurrency), 0


def main(args: argparse.Namespace) -> int:
    """Prints figures and judges none, so the exit status is 0. The sequences are A's where there is no text."""
    if args.b is None and args.save is None:
        raise ValueError("there is nothing to do: give --b URL to compare with, --save FILE, or both")
    if args.save:
        check_can_write("--save", args.save)
    if args.a.startswith(("http://", "https://")):
        client_a = make_client(args, args.a)
        scores_a = score(client_a, sequences(client_a, args)[0], args.concurrency)
    else:
        client_a, scores_a = None, Scores.read(Path(args.a))
    if args.save:
        scores_a.write(args.save)
    if args.b is None:
        print(json.dumps({"eval": "logits", "saved": str(args.save), "sequences": len(scores_a.sequences)}))
        return 0
    client_b = make_client(args, args.b)
    if client_a is not None:
        texts.need_same_tokenizer(client_a, client_b)
    found = difference(scores_a, score(client_b, scores_a.sequences, args.concurrency))
    for name, value in found.items():
        print(f"{name:20} {value}")
    print(json.dumps({"eval": "logits", "a": args.a, "b": args.b} | found))
    return 0
