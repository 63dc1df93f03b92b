"""What the settings of an engine mean for a model on one rank: device, step, context, KV layout. Nothing is loaded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.errors import MachineError
from engine.expert_file import read_load
from engine.kv_cache import KvLayout
from engine.prompt_graphs import largest_prompt_step
from model.batch import KvLayerSpec

if TYPE_CHECKING:  # a scripted engine needs no model
    from model.config import ModelSettings

_KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}  # auto: the model's
_DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 8192}


def make_model_settings(config: EngineConfig, device: torch.device, rank: int = 0) -> "ModelSettings":
    """The model's part of the settings of one rank, for a device that need not exist here."""
    from model.balance import BalanceSettings
    from model.config import ModelSettings
    from model.parallel import ParallelLayout
    from moe import MoeA2ABackend, MoeBackend
    from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
    from moe.tune.layers import TuningSettings
    from moe.tune.policy import tuning_token_counts

    step_tokens = max_step_tokens(config, device)
    return ModelSettings(
        device=device,
        dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
        kv_dtype=_KV_DTYPES.get(config.kv_cache_dtype, "auto"),
        moe_backend=MoeBackend(config.moe_backend),
        moe_a2a_backend=MoeA2ABackend(config.moe_a2a_backend),
        deepep=DeepepSettings(
            mode=DeepepMode(config.deepep_mode),
            max_dispatch_tokens=config.deepep_max_dispatch_tokens,
            overlaps_down_gemm=config.enable_single_batch_overlap,
        ),
        max_num_tokens=step_tokens,
        tuning=TuningSettings(
            is_on=config.tune,
            cache_folder=config.tune_cache_dir,
            token_counts=tuning_token_counts(step_tokens, config.max_num_seqs),
        ),
        balance=BalanceSettings(
            counts=config.expert_load,
            has_replicas=config.enable_eplb,
            num_redundant=config.num_redundant_experts,
            load=None if config.eplb_load is None else read_load(config.eplb_load),
        ),
        router_logits_dtype=config.router_logits_dtype,
        attention_backend=config.attention_backend,
        load_format=config.load_format,
        selfcheck=config.selfcheck,
        one_shot_sums=config.one_shot_sums,
        layout=ParallelLayout(
            tp_size=config.tensor_parallel_size,
            dp_size=config.data_parallel_size,
            ep_size=config.expert_parallel_size,
            rank=rank,
        ),
    )


def rank_device_name(config: EngineConfig, rank: int) -> str:
    """The device setting of a rank: the GPUs of a host go to its ranks in order, unless the setting names one GPU."""
    index = config.base_gpu_id + rank - config.local_ranks.start
    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return f"cuda:{index}" if is_cuda and (config.num_ranks > 1 or index) else config.device


def choose_device(name: str) -> torch.device:
    """The device of a setting; a GPU with a number becomes the current one.

    Raises:
        MachineError: torch does not find it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError(f"device is {name!r} and torch finds no CUDA device: use cpu, or install a CUDA torch")
    device = torch.device(name)
    if device.index is not None:
        num_devices = torch.cuda.device_count()
        if device.index >= num_devices:
            raise MachineError(f"device is {name!r}: torch finds {num_devices} CUDA devices, cuda:0 is the first")
        torch.cuda.set_device(device)  # Triton's launches, streams and graphs go to the current device
    return device


def max_step_tokens(config: EngineConfig, device: torch.device) -> int:
    """Tokens of the largest step: where ranks replay graphs for prompts, those of the largest graph."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    num_tokens = _DEFAULT_STEP_TOKENS.get(device.type, 512)
    if device.type == "cuda" and config.num_ranks > 1:
        num_tokens = largest_prompt_step(config) or num_tokens
    return max(num_tokens, config.max_num_seqs)


def make_kv_layout(config: EngineConfig, specs: Sequence[KvLayerSpec], model_dtype: torch.dtype) -> KvLayout:
    """The cache that the settings ask for.

    FP8 has no scales: E4M3 has its full precision from 2^-6 to 448, and what is larger saturates. A static scale would
    move that range, not add precision, and would have to be calibrated.
    """
    dtype = _KV_DTYPES.get(config.kv_cache_dtype, model_dtype)
    return KvLayout(specs=tuple(specs), page_size=config.page_size, dtype=dtype)
