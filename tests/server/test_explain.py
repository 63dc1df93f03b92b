"""`moe-serve explain`: the command around `moe.choose.explain`."""

import json

import pytest

from server import cli
from tests.tables import rows

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 96, "hidden_size": 2048, "intermediate_size": 2048,
    "moe_intermediate_size": 1024, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "kv_lora_rank": 32,
    "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512,
}  # fmt: skip


def run(capsys, *argv):
    code = cli.main(["explain", *argv])
    return code, *capsys.readouterr()


def test_the_bundled_model_on_a_hopper_gpu(capsys):
    code, out, err = run(capsys, "--gpu", "sm90", "--format", "mxfp4", "--a2a", "none")
    assert (code, err) == (0, "")
    experts, attention = out.split("\n\n")
    first, *rows = experts.splitlines()
    assert first == "tiny-gpt-oss: 8 experts of 288 x 288, top-2, as mxfp4 on sm90, transport none"
    assert {row.split()[0] for row in rows} >= {"torch", "triton", "flashinfer_mxfp4", "deep_gemm"}
    assert sum("<- auto" in row for row in rows) == 1
    assert attention.startswith("attention of heads on sm90\n")
    assert attention.count("<- auto") == 1


def test_the_biases_of_the_model_count(capsys):
    """GPT-OSS has biases, which the FP8 block kernels do not read."""
    _, out, _ = run(capsys, "--gpu", "sm90", "--format", "fp8_block")
    row = next(row for row in out.splitlines() if row.startswith("deep_gemm"))
    assert row.endswith("fp8_block experts with biases are not supported")


def test_the_model_may_come_from_the_variable_as_for_plan(capsys, monkeypatch):
    monkeypatch.setenv("MOE_SERVE_MODEL", "tiny-deepseek-v3")
    assert run(capsys, "--gpu", "cpu", "--format", "mxfp4")[1].startswith("tiny-deepseek-v3: ")
    assert run(capsys, "--gpu", "cpu", "--format", "mxfp4", "--model", "tiny-gpt-oss")[1].startswith("tiny-gpt-oss: ")


@pytest.fixture
def deepseek(tmp_path):
    """A folder with nothing but the config of a model whose sizes fit every backend."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    return str(tmp_path)


def test_the_shape_is_the_models(capsys, deepseek):
    _, out, _ = run(capsys, "--gpu", "cpu", "--format", "mxfp4", "--model", deepseek)
    assert "16 experts of 2048 x 1024, top-4" in out
    assert out.endswith("\n")


def test_the_mode_of_the_transport_counts(capsys, deepseek):
    def line(mode):
        flags = ("--gpu", "sm100", "--format", "nvfp4", "--a2a", "deepep", "--deepep-mode", mode, "--model", deepseek)
        _, out, _ = run(capsys, *flags)
        return next(row for row in out.splitlines() if row.startswith("flashinfer_cutedsl"))

    assert "usable" in line("low_latency")
    assert "usable" not in line("normal")


@rows(
    "argv, words",
    (["--gpu", "sm91", "--format", "mxfp4"], "--gpu sm91 is not known; known: sm80"),
    (["--gpu", "sm90", "--format", "int3"], "--format int3 is not known"),
    (["--gpu", "sm90", "--format", "mxfp4", "--a2a", "pigeon"], "invalid choice"),
    (["--format", "mxfp4"], "--gpu"),
    (["--gpu", "sm90", "--format", "mxfp4", "--model", "/nope"], "/nope"),
)
def test_mistakes_are_one_line(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert (code, out, err.count("\n")) == (cli.USAGE_ERROR, "", 1)
    assert words in err
