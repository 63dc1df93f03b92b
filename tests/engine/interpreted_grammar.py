"""Runs the sampling kernels on rows with grammars in Triton's interpreter; prints what differs from torch, as JSON."""

import json
import sys

from engine.grammar_spec import json_object, regex, text
from engine.sampler import launch_sampling
from engine.sequence import Sequence
from tests.engine.grammars import EOS, bound, compiler, ids
from tests.engine.interpreted_sampling import gpu_sampler, make, run, spread_logits

BEGUN = ((text("abc"), "a"), (regex("[0-9]*"), "12"), (json_object(), ""), (regex("ab?"), "a"))


def rows():
    """Rows in the middle of an answer, with one that is free between them."""
    seqs = []
    for index, (format_, beginning) in enumerate(BEGUN):
        item = bound(f"r{index}", format_, seed=index, min_tokens=index, logprobs=2, logit_bias={5: 3.0})
        seq = Sequence(item, stop_ids=frozenset({EOS}), seed=index)
        seq.grammar = compiler().make_matcher(compiler().compile(item.grammar.format_json).result())
        for token in ids(beginning):
            seq.token_ids.append(token)
            seq.grammar.accept(token)
        seqs.append(seq)
    return [*seqs[:2], make(9, seed=9), *seqs[2:]]


def main():
    """Tokens that differ, over several draws."""
    off = 0
    for scale in (0.1, 1.0, 3.0):
        logits = spread_logits(5, 97, scale)
        got, want = run(gpu_sampler(97), logits, rows()), launch_sampling(logits.clone(), rows()).read()
        off += sum(a != b for a, b in zip(got.tokens, want.tokens, strict=True))
    json.dump(off, sys.stdout)


if __name__ == "__main__":
    main()
