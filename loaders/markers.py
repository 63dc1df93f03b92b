"""The markers of the syntaxes that models write in: Harmony (GPT-OSS) and DeepSeek. The parsers know what they mean.

An added token that is a marker is a control token even where no file flags it special: DeepSeek's tokenizers flag
neither `<think>` nor the markers of roles, calls and results.
"""

from enum import StrEnum


class Harmony(StrEnum):
    """The markers of GPT-OSS."""

    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"
    CALL = "<|call|>"
    RETURN = "<|return|>"
    END_OF_TEXT = "<|endoftext|>"


class DeepSeek(StrEnum):
    """The markers of V3, R1 and V3.1. No parser reads those of code (FIM) and search, but no user may write them."""

    END = "<｜end▁of▁sentence｜>"
    USER = "<｜User｜>"
    ASSISTANT = "<｜Assistant｜>"
    THINK = "<think>"
    THINK_END = "</think>"
    CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
    CALL_BEGIN = "<｜tool▁call▁begin｜>"
    CALL_SEP = "<｜tool▁sep｜>"
    CALL_END = "<｜tool▁call▁end｜>"
    CALLS_END = "<｜tool▁calls▁end｜>"
    OUTPUTS_BEGIN = "<｜tool▁outputs▁begin｜>"
    OUTPUT_BEGIN = "<｜tool▁output▁begin｜>"
    OUTPUT_END = "<｜tool▁output▁end｜>"
    OUTPUTS_END = "<｜tool▁outputs▁end｜>"
    FIM_BEGIN = "<｜fim▁begin｜>"
    FIM_HOLE = "<｜fim▁hole｜>"
    FIM_END = "<｜fim▁end｜>"
    SEARCH_BEGIN = "<｜search▁begin｜>"
    SEARCH_END = "<｜search▁end｜>"


MARKERS: frozenset[str] = frozenset((*Harmony, *DeepSeek))
