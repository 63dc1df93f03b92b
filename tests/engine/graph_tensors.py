"""What captured steps keep in memory beside their logits, from the tensors themselves."""

import torch

from engine.cuda_graphs import DecodeGraphs
from engine.prompt_graphs import PromptGraphs


def bytes_kept(decodes: DecodeGraphs, prompts: PromptGraphs | None, tokens_M: torch.Tensor) -> int:
    """Bytes of all tensors that the graphs, their buffers and their inputs own; `tokens_M` is the runner's."""
    owners = [decodes, decodes.buffers, decodes.inputs, *([] if prompts is None else [prompts, prompts.buffers])]
    values = [value for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    del storages[tokens_M.untyped_storage().data_ptr()]
    return sum(storages.values())
