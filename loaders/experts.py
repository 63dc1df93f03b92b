"""One layer's experts from a checkpoint to canonical `ExpertWeights` ([gate; up], not interleaved), for one rank.

Two ways of storing them, each with its own reader: all experts in one tensor (GPT-OSS), or one linear layer per expert
and projection (DeepSeek). Both decide the number format from the headers and read only what the rank holds.
"""

from loaders.fused_experts import read_gpt_oss_experts
from loaders.split_experts import ExpertNames, read_split_experts

__all__ = ["ExpertNames", "read_gpt_oss_experts", "read_split_experts"]
