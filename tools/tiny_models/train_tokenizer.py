"""Trains a family's byte-level BPE on the generated corpus and writes tokenizer.json.

python -m tools.tiny_models tokenizer --family deepseek_v3 --documents 60000
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny_models.data.mix import draw
from tools.tiny_models.data.words import common
from tools.tiny_models.dialect import Dialect
from tools.tiny_models.families import FAMILIES, load_family

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


def corpus(dialect: Dialect, special: tuple[str, ...], documents: int, seed: int) -> list[str]:
    """Generated conversations, cut at special tokens: those never take part in merges."""
    rng = random.Random(f"tokenizer{seed}")
    cut = re.compile("|".join(map(re.escape, special)))
    texts: list[str] = []
    for _ in range(documents):
        texts += filter(None, cut.split(dialect.plain_text(dialect.adapted(rng, draw(rng)))))
    return texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--documents", type=int, default=60000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: the tokenizer.json of the family")


def main(args: argparse.Namespace) -> int:
    """Train and write. Raises ValueError where the corpus is too small for the vocabulary."""
    family = load_family(args.family)
    first, last = family.first_tokens, family.last_tokens
    out = args.out or family.dialect.folder / "tokenizer.json"
    tokenizer = build()
    trainer = trainers.BpeTrainer(
        vocab_size=family.vocab_size - len(last),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in first],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(family.dialect, (*first, *last), args.documents, args.seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special="think>" not in token, normalized=False) for token in last])
    if tokenizer.get_vocab_size() != family.vocab_size:
        raise ValueError(
            f"vocabulary has {tokenizer.get_vocab_size()} entries, not {family.vocab_size}: use more documents"
        )
    tokenizer.save(str(out), pretty=False)
    print(f"{out}: {out.stat().st_size} bytes")
    return 0
