"""Layouts of checkpoints that are not read: recognised by a tensor's name, with what to take instead."""

import re

from loaders.errors import CheckpointError
from loaders.source import TensorSource

_INNER = "save the model inside the wrapper, or take another upload"
_LAYOUTS = tuple(
    (re.compile(pattern), found)
    for pattern, found in (
        (
            r"^block\..*\.mlp\.mlp1_weight",
            "this is OpenAI's original/ layout of GPT-OSS; give the main folder of the Hugging Face download instead",
        ),
        (
            r"\.lora_(A|B|embedding_A|embedding_B)\.",
            "this is a LoRA adapter; merge it into its model (PEFT: merge_and_unload) and give the folder of that",
        ),
        (
            r"\.experts\.(gate_up|down)_projs\.\d+\.",
            "each expert is a layer of its own here, as Unsloth trains them; export with save_pretrained_merged",
        ),
        (
            r"\.experts\.\d+\.gate_up_proj[._]",
            "each expert is a layer of its own here, as Quark writes them; take openai's upload, or one in bf16",
        ),
        (
            r"^(module|_orig_mod)\.",
            f"the model was saved with the wrapper that it was trained or compiled in; {_INNER}",
        ),
        (
            r"^(model\.)?language_model\.",
            "this is the language model inside another model, such as one that sees images; take an upload of it alone",
        ),
    )
)


def refuse_foreign_layout(source: TensorSource) -> None:
    """Raise CheckpointError if a name shows a layout that is known and not read; the message says what to do."""
    for name in source.names():
        for pattern, found in _LAYOUTS:
            if pattern.search(name):
                raise CheckpointError(f"{source.meta(name).where}: {found}")
