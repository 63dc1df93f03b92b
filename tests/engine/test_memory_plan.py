"""Plans of published shapes, from config.json alone and from headers; what does not fit says what to change."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from engine import load
from engine.config import EngineConfig
from engine.errors import EngineConfigError, MachineError
from engine.kv_cache import GIB, KvLayout, count_pages
from engine.memory_plan import check_weights_fit, graph_bytes, sampling_bytes
from engine.plan import GPUS, Gpu, plan_engine
from engine.prompt_graphs import largest_prompt_step
from model.batch import KvLayerSpec
from model.config import ModelSettings
from model.sizes import measure_model
from moe import MoeBackend
from moe.cpu.memory import usable_bytes
from moe.shared_memory import NUM_BYTES
from tests.engine.graph_tensors import bytes_kept
from tests.tables import rows

ASSETS = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "sliding_window": 128, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 131072,
    "rope_theta": 150000, "eos_token_id": 200002, "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "max_position_embeddings": 163840, "rope_theta": 10000, "eos_token_id": 1,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip


def make_folder(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_for(folder: Path, gpu: Gpu | None, **settings):
    return plan_engine(EngineConfig(model=folder, load_format="dummy", **settings), gpu)


@pytest.fixture
def gpt_oss(tmp_path):
    return make_folder(tmp_path, GPT_OSS_20B)


def test_gpt_oss_20b_to_the_byte(gpt_oss):
    plan, max_model_len = plan_for(gpt_oss, GPUS["h100"])
    sizes = plan.sizes
    vocab = 201088 * 2880 * 2
    attention = 24 * 2 * ((64 + 16) * 64 * 2880 + (64 + 16) * 64 + 2880 * 64 * 64 + 2880)
    small = 24 * (32 * 2880 + 32) * 2 + 49 * 2880 * 2 + 24 * 64 * 2  # routers, norms, sinks in bf16
    stored_experts = 24 * 32 * (3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2)
    assert sizes.stored_bytes == stored_experts + attention + 2 * vocab + small == 13_761_264_768
    assert sizes.dense_bytes == attention + 2 * small + 131072 * 64 * 4  # those are fp32 in memory, and the rotations
    assert (sizes.embedding_bytes, sizes.head_bytes) == (vocab, vocab)
    (path,) = sizes.experts
    assert (path.backend, path.format_name, path.num_layers) == (MoeBackend.TRITON, "mxfp4", 24)
    assert path.stored_bytes * 24 == stored_experts
    assert stored_experts < path.processed_bytes * 24 < 1.01 * stored_experts
    assert (plan.kv_bytes_per_token(sliding=False), plan.kv_bytes_per_token(sliding=True)) == (24576, 24576)
    assert max_model_len == 131072
    free = int(79.2 * GIB * 0.9) - sizes.total_bytes - plan.context_bytes
    tables = 2 * 8192 * 4 * (64 + 64 + 65)  # of both kinds of layers: sent, of decodes, and of prompts with padding
    rows_bytes = 4 * (2 + 3 * 64 + 64 + 65) + 12 * (64 + 65) + 2 * 4  # numbers, lengths, then starts and logit rows
    buffers = tables + rows_bytes + 4 * 8 * (64 + 1024)  # id, position and two slots of a token
    assert plan.graph_buffer_bytes == buffers
    step = plan.activation_bytes + sampling_bytes(64, 201088) + graph_bytes(64, 201088, max_prompt_tokens=1024)
    step += buffers
    assert plan.num_pages == int(int(79.2 * GIB) * 0.9 - (int(79.2 * GIB * 0.9) - free) - step) // (24576 * 16)
    table = plan.table(max_model_len)
    assert list(table) == [1024 << i for i in range(8)]
    assert table[131072] == plan.num_pages // (8192 + 9), "sliding layers keep nine pages each"
    assert plan.fits_while_loading
    assert plan.refusal is None


def test_deepseek_v3_needs_more_than_one_gpu(tmp_path):
    folder = make_folder(tmp_path, DEEPSEEK_V3)
    plan, _ = plan_for(folder, GPUS["h200"])
    sizes = plan.sizes
    # 671.0 billion parameters: FP8 bytes of all linears but embedding, head and gates, and their scales
    assert 671e9 < sizes.stored_bytes < 676e9
    (path,) = sizes.experts
    assert (path.format_name, path.num_layers) == ("fp8_block", 58)
    assert path.stored_bytes == 256 * 3 * (7168 * 2048 + 56 * 16 * 4)
    assert plan.kv_bytes_per_token(sliding=False) == 61 * (512 + 64) * 2
    assert plan.kv_bytes_per_token(sliding=True) == 0
    assert plan.refusal is not None
    assert "gpu_memory_utilization is 0.9: of 139.8 GiB it allows 125.8 GiB, but the weights take 630" in plan.refusal
    assert not plan.fits_while_loading
    assert set(plan.table(4096).values()) == {0}
    large, _ = plan_for(folder, Gpu("sm90", 1000.0))
    assert large.refusal is None
    assert large.num_pages > 0


def test_the_bundled_model_on_a_cpu_takes_what_the_engine_takes():
    plan, max_model_len = plan_engine(EngineConfig(model=ASSETS), None)
    loaded = load.load_engine(EngineConfig(model=ASSETS, selfcheck="off"), None)
    assert (plan.num_pages, max_model_len) == (loaded.num_pages, loaded.max_model_len)
    assert plan.total_bytes == usable_bytes()
    assert plan.fits_while_loading
    assert plan_engine(EngineConfig(model=ASSETS, num_pages=300), None)[0].num_pages == 600


DENSE_EXPERTS = 24 * 32 * (3 * 2880 * 2880 + 3 * 2880) * 4  # of GPT-OSS-20B in fp32


@rows(
    "memory_gib, settings, expert_bytes, words",
    (256, {}, DENSE_EXPERTS, None),
    (40, {}, 24 * 32 * (3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2), None),  # as they are stored
    (12, {"max_model_len": 4096}, None, "is 12.0 GiB for each rank, but the weights take "),
    (40, {"num_pages": 20_000}, None, "KV pages 29.3 GiB and a step"),
    (40, {"num_pages": 200_000}, None, "num_pages is 200000: KV pages of "),
    (80, {"tensor_parallel_size": 2, "num_pages": 50_000}, None, "is 40.0 GiB for each rank"),
)
def test_a_cpu_is_refused_what_its_memory_cannot_hold(gpt_oss, monkeypatch, memory_gib, settings, expert_bytes, words):
    """It was killed while it loaded, and the plan said that all is well."""
    monkeypatch.setattr("engine.plan.usable_bytes", lambda: memory_gib * GIB)
    plan, _ = plan_for(gpt_oss, None, device="cpu", **settings)
    if words is None:
        assert (plan.refusal, plan.sizes.expert_bytes) == (None, expert_bytes)
        assert plan.num_pages > 0
    else:
        assert words in plan.refusal
        assert plan.num_pages == 0


def test_the_engine_refuses_what_the_plan_refuses_on_a_cpu(monkeypatch):
    monkeypatch.setattr("model.registry.build_model", lambda *_args, **_rest: pytest.fail("the model was loaded"))
    monkeypatch.setattr("engine.plan.usable_bytes", lambda: 1 << 20)
    with pytest.raises(EngineConfigError, match=r"the memory of this machine, .* is 1.0 MiB .* but the weights take"):
        load.load_engine(EngineConfig(model=ASSETS, device="cpu", num_pages=1, max_model_len=16), None)


@rows(
    "model, settings",
    ("tiny-gpt-oss", {}),
    ("tiny-gpt-oss", {"max_num_seqs": 12, "max_model_len": 500, "page_size": 8}),
    ("tiny-deepseek-v3", {"max_num_seqs": 3, "max_num_batched_tokens": 50, "max_model_len": 900}),
)
def test_buffers_of_captured_steps_are_planned_to_the_byte(model, settings):
    """Of the tensors that the engine makes, here on a CPU. Sliding layers have page tables of their own."""
    config = EngineConfig(model=ASSETS.parent / model, selfcheck="off", **settings)
    plan, max_model_len = plan_engine(config, GPUS["h100"])
    loaded = load.load_engine(dataclasses.replace(config, device="cpu", max_num_batched_tokens=None), None)
    assert loaded.runner.is_sliding is (model == "tiny-gpt-oss")
    graphs = load._make_graphs(config, loaded.runner, max_model_len, plan.needs.step_tokens, spare_page=0)
    assert plan.graph_buffer_bytes == bytes_kept(*graphs, loaded.runner.tokens_M)


def test_settings_change_the_plan(gpt_oss):
    base, _ = plan_for(gpt_oss, GPUS["h100"])
    half, _ = plan_for(gpt_oss, GPUS["h100"], gpu_memory_utilization=0.5)
    assert half.num_pages < base.num_pages / 1.5
    eager, _ = plan_for(gpt_oss, GPUS["h100"], enforce_eager=True)
    assert (eager.graph_bytes, base.graph_bytes) == (0, graph_bytes(64, 201088, max_prompt_tokens=1024))
    assert eager.graph_buffer_bytes == 0 < base.graph_buffer_bytes
    small_steps, _ = plan_for(gpt_oss, GPUS["h100"], max_num_batched_tokens=1024)
    assert small_steps.activation_bytes * 8 == base.activation_bytes
    wide, _ = plan_for(gpt_oss, GPUS["h100"], kv_cache_dtype="float32")
    assert wide.layout.bytes_per_page == 2 * base.layout.bytes_per_page
    narrow, _ = plan_for(gpt_oss, GPUS["h100"], kv_cache_dtype="fp8")
    assert narrow.layout.bytes_per_page * 2 == base.layout.bytes_per_page
    assert narrow.kv_bytes_per_token(sliding=False) == 12288
    assert narrow.num_pages // 2 == base.num_pages
    short, length = plan_for(gpt_oss, GPUS["h100"], max_model_len=5000)
    assert length == 5000
    assert list(short.table(length)) == [1024, 2048, 4096, 5000]
    assert plan_for(gpt_oss, GPUS["h100"], num_pages=100)[0].num_kv_tokens == 1600
    other, _ = plan_for(gpt_oss, GPUS["b200"], moe_backend="flashinfer_mxfp4")
    assert other.sizes.experts[0].backend is MoeBackend.FLASHINFER_MXFP4
    assert other.sizes.experts[0].processed_bytes > base.sizes.experts[0].processed_bytes  # padded to 3072


def test_graphs_of_prompts_take_memory_only_where_they_are_captured(gpt_oss):
    """With a transport none are, and steps are as large as on one rank; they used to be counted all the same."""
    ranks = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    for settings, max_prompt_tokens, step_tokens in (
        ({}, 1024, 8192),
        ({"max_num_batched_tokens": 200}, 200, 200),
        ({"max_model_len": 500}, 500, 8192),
        (ranks, 4096, 4096),
        (ranks | {"moe_a2a_backend": "deepep"}, 0, 8192),
    ):
        plan, _ = plan_for(gpt_oss, GPUS["h100"], **settings)
        tp_size = settings.get("tensor_parallel_size", 1)
        assert plan.graph_bytes == graph_bytes(64, 201088, tp_size, max_prompt_tokens=max_prompt_tokens), settings
        assert plan.needs.step_tokens == step_tokens, settings


def test_ranks_that_read_each_others_memory_set_it_aside(gpt_oss):
    alone, shared = (plan_for(gpt_oss, GPUS["h100"], tensor_parallel_size=size)[0] for size in (1, 2))
    assert shared.context_bytes - alone.context_bytes == NUM_BYTES > 64 << 20


def test_without_graphs_the_default_step_of_ranks_is_that_of_one_gpu(gpt_oss):
    """Smaller steps would hide less of the launches, and there is no graph that they could replay."""
    eager = {"enforce_eager": True, "tensor_parallel_size": 2, "expert_parallel_size": 2}
    for settings, step_tokens in (({}, 8192), ({"max_num_seqs": 9000}, 9000), ({"max_num_batched_tokens": 300}, 300)):
        plan, _ = plan_for(gpt_oss, GPUS["h100"], **eager, **settings)
        assert (plan.graph_bytes, plan.needs.step_tokens) == (0, step_tokens), settings
        assert largest_prompt_step(EngineConfig(model=gpt_oss, **eager, **settings)) == 0


def test_what_does_not_fit_names_the_settings(gpt_oss):
    for memory_gib, words in (
        (8.0, "but the weights take 12.9 GiB (experts 9.5 GiB, mxfp4 as triton)"),
        (16.5, "leaves no room for a KV page of 786432 bytes; raise it, lower max_num_batched_tokens or max_num_seqs"),
    ):
        plan, _ = plan_for(gpt_oss, Gpu("sm90", memory_gib))
        assert words in plan.refusal
        assert plan.num_pages == 0
    plan, _ = plan_for(gpt_oss, GPUS["h100"], num_pages=10**6)
    assert plan.refusal.startswith("num_pages is 1000000: ")
    with pytest.raises(EngineConfigError, match="max_model_len is 200000"):
        plan_for(gpt_oss, GPUS["h100"], max_model_len=200000)


def test_the_longest_context_is_what_the_cache_holds(gpt_oss):
    plan, max_model_len = plan_for(gpt_oss, Gpu("sm90", 19.0))
    assert plan.refusal is None
    assert max_model_len == plan.num_kv_tokens < 131072
    assert plan.table(max_model_len)[max_model_len] == 1


def test_pages_are_what_is_left():
    layout = KvLayout(specs=(KvLayerSpec(num_heads=1, key_dim=64, value_dim=64),), page_size=16, dtype=torch.float32)
    page = 16 * 128 * 4
    budget = {"total_bytes": 100 * page, "utilization": 0.5, "used_bytes": 20 * page}
    assert count_pages(layout, **budget, step_bytes=29 * page) == 1
    with pytest.raises(MachineError, match="leaves no room for a KV page of 8192 bytes"):
        count_pages(layout, **budget, step_bytes=29 * page + 1)


def test_the_engine_refuses_weights_that_cannot_fit_before_it_reads_them(monkeypatch):
    """On a GPU of 16 MiB; `build_model` must not be reached."""
    monkeypatch.setattr(load, "choose_device", lambda _name: torch.device("cuda"))
    monkeypatch.setattr("model.registry.build_model", lambda *_args, **_rest: pytest.fail("the model was loaded"))
    settings = ModelSettings(device=torch.device("cpu"))
    sizes = measure_model(ASSETS, settings)
    monkeypatch.setattr("model.sizes.measure_model", lambda _folder, _settings: sizes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (15 << 20, 16 << 20))
    with pytest.raises(EngineConfigError, match=r"utilization is 0.9: .* but the weights take .*moe_backend"):
        load.load_engine(EngineConfig(model=ASSETS), None)


def test_running_out_of_memory_while_loading_has_the_words_of_the_plan(monkeypatch):
    """The peak is estimated from above, so the engine tries; what then fails is the user's to mend, not a bug."""

    def build_model(*_args, **_rest):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(load, "choose_device", lambda _name: torch.device("cuda"))
    monkeypatch.setattr("model.registry.build_model", build_model)
    sizes = measure_model(ASSETS, ModelSettings(device=torch.device("cpu")))
    monkeypatch.setattr("model.sizes.measure_model", lambda _folder, _settings: sizes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (sizes.peak_bytes - 1, 64 << 20))
    with pytest.raises(MachineError, match=r"the weights do not fit while they are loaded: .* of 64.0 MiB"):
        load.load_engine(EngineConfig(model=ASSETS, gpu_memory_utilization=1.0), None)


def test_weights_that_just_fit():
    sizes = measure_model(ASSETS, ModelSettings())
    least = sizes.least_bytes
    check_weights_fit(sizes, total_bytes=2 * least + 4, utilization=0.5, used_bytes=1)
    with pytest.raises(EngineConfigError):
        check_weights_fit(sizes, total_bytes=2 * least, utilization=0.5, used_bytes=1)
    grown = dataclasses.replace(sizes, dense_bytes=sizes.dense_bytes + 100)
    with pytest.raises(EngineConfigError):
        check_weights_fit(grown, total_bytes=2 * least + 4, utilization=0.5, used_bytes=1)
    with pytest.raises(MachineError, match="2 bytes are in use already"):
        check_weights_fit(sizes, total_bytes=2 * least + 4, utilization=0.5, used_bytes=2)
