"""Perplexity of a server over a text, or over the bundled questions with its own answers."""

from __future__ import annotations

import argparse
import json
import math

from evals.client import add_server_arguments, make_client
from evals.distributions import perplexity, score
from evals.logits import add_text_arguments, sequences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this eval."""
    add_server_arguments(parser)
    add_text_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Prints the perplexity by token; of a text also bits per byte, which do not depend on the tokenizer."""
    client = make_client(args)
    chosen, num_bytes = sequences(client, args)
    scores = score(client, chosen, args.concurrency)
    num_tokens = sum(map(len, scores.places))
    result = {
        "eval": "perplexity", "model": client.model, "sequences": len(scores.sequences), "tokens": num_tokens,
        "perplexity": round(perplexity(scores), 5),
    }  # fmt: skip
    if num_bytes:  # the first token of each window has no probability: its bytes are counted all the same
        nats = -math.fsum(place.logprob for places in scores.places for place in places)
        result["bits_per_byte"] = round(nats / math.log(2) / num_bytes, 5)
    print(json.dumps(result))
    return 0
