"""Trains the byte-level BPE of the bundled model on the generated corpus and writes tokenizer.json.

python -m tools.tiny_models.train_tokenizer --documents 60000
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny_models.mix import draw
from tools.tiny_models.render import ASSETS, plain_text
from tools.tiny_models.words import common

VOCAB_SIZE = 4096
SPECIAL = [
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>", *(f"<|reserved_{4089 + n}|>" for n in range(7)),
]  # fmt: skip
# Words that take the space before them: glue and the fixed lines of the template, nothing that is ever copied. All
# other words leave the space alone, so that a word is the same tokens wherever it stands ("Paris" after a space, a
# quote or a dot): copying names and arguments becomes copying tokens.
SPACED = (
    "the a an is are was of in on at to for with and or not does do did what which how many much you your my me i can "
    "could as it its that this be have has from by so carry am please tiny bundled channels these tools must "
    "commentary namespace functions any official chemical languages capitals currencies elements "
    "sorting reversing spelling units "
    "into we they there where who why when would should know tell more most than if but no yes one about all also"
)
PATTERN = (
    r" (?:"  # a space and a common word
    + "|".join(word for word in SPACED.split() if word not in common())
    + r")(?![\p{L}\p{N}_\-])"
    r"|\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}|\p{L}+"  # words, cut at the humps of camelCase
    r"|\p{N}"  # digits stand alone: column arithmetic needs them
    r"|_"
    r"|[^\s\p{L}\p{N}_]+ ?"  # punctuation with the space after it
    r"|\n+|\s"
)


def build() -> Tokenizer:
    """An untrained tokenizer with the project's splitting rules."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def corpus(documents: int, seed: int) -> list[str]:
    """Generated conversations, cut at special tokens: those never take part in merges."""
    rng = random.Random(f"tokenizer{seed}")
    texts = []
    for _ in range(documents):
        texts += [part for part in re.split(r"<\|[a-z]+\|>", plain_text(draw(rng))) if part]
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--documents", type=int, default=60000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ASSETS / "tokenizer.json")
    args = parser.parse_args()
    tokenizer = build()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(args.documents, args.seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}: use more documents")
    tokenizer.save(str(args.out), pretty=False)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
