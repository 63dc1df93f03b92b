"""The command `plan`: its flags, text, JSON and exit status."""

import json
import subprocess
import sys

import pytest

from engine.plan import GPUS
from loaders.safetensors_file import SafetensorsFile
from server import cli
from tests.engine.test_memory_plan import GPT_OSS_20B
from tests.server.conftest import ASSETS
from tests.server.fake_hub import Repository, run_hub
from tests.server.service_process import ROOT
from tests.tables import rows

DEEPSEEK = json.loads((ASSETS.parent / "tiny-deepseek-v3" / "config.json").read_bytes())


@pytest.fixture
def gpt_oss(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    return tmp_path


def test_text_of_a_plan(capsys, gpt_oss):
    assert cli.main(["plan", "--model", str(gpt_oss), "--gpu", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "on h200: 139.8 GiB, of which 90% may be used" in shown
    assert "12.816 GiB in the files, as the config says: no weights are here" in shown
    assert "24 layers, mxfp4 as triton" in shown
    assert "49152 bytes: 24576 in full layers, 24576 in sliding ones (window 128), which keep only what they" in shown
    assert " tokens fit, " in shown
    assert "graph buffers          12.098 MiB  ids, slots and page tables that the graphs read" in shown
    assert [line.split()[0] for line in shown.splitlines()[-8:]] == [str(1024 << i) for i in range(8)]


NVFP4_FILE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*attn*"]}}


@rows(
    "config, quant_file, format_name",
    (GPT_OSS_20B, None, "mxfp4"),
    (GPT_OSS_20B | {"quantization_config": None}, None, "bf16"),
    (DEEPSEEK, None, "fp8_block"),
    (DEEPSEEK | {"quantization_config": None}, None, "bf16"),
    (DEEPSEEK | {"quantization_config": None}, NVFP4_FILE, "nvfp4"),
    (DEEPSEEK, NVFP4_FILE, "nvfp4"),
    (DEEPSEEK | {"quantization_config": {"quant_method": "modelopt_fp4"}}, None, "nvfp4"),
    (DEEPSEEK | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, None, "fp8_tensor"),
    (DEEPSEEK | {"quantization_config": {"quant_method": "quark"}}, None, "mxfp4"),
)
def test_without_weights_the_config_files_say_the_format(
    capsys, tmp_path, monkeypatch, config, quant_file, format_name
):
    monkeypatch.setattr("engine.plan.usable_bytes", lambda: 1 << 40)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if quant_file is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant_file))
    assert cli.main(["plan", "--model", str(tmp_path), "--gpu", "cpu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [path["format"] for path in shown["weights"]["experts"]] == [format_name]


def test_the_plan_of_a_model_on_the_hub_knows_its_quantization(capsys, tmp_path, monkeypatch):
    folder = ASSETS.parent / "tiny-deepseek-v3-nvfp4"
    with run_hub() as hub:
        hub.repositories["maker/tiny"] = Repository(
            {"main": {path.name: path.read_bytes() for path in folder.iterdir()}}
        )
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        documents = []
        for model in ("maker/tiny", str(folder)):
            assert cli.main(["plan", "--model", model, "--gpu", "b200", "--json"]) == 0
            documents.append(json.loads(capsys.readouterr().out)["weights"])
    on_hub, here = documents
    assert [path["format"] for path in on_hub["experts"]] == ["nvfp4"]
    assert [on_hub[key] for key in ("experts", "dense", "head")] == [here[key] for key in ("experts", "dense", "head")]


def test_json_of_a_plan_takes_the_flags_and_variables_of_the_service(capsys, monkeypatch):
    monkeypatch.setenv("MOE_SERVE_MAX_MODEL_LEN", "2000")
    assert cli.main(["plan", "--gpu", "a100", "--gpu-memory", "4", "--json", "--page-size", "8"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model"], shown["gpu"], shown["gpu_bytes"]) == ("tiny-gpt-oss", "a100", 4 << 30)
    assert shown["weights"]["from_headers"]
    assert shown["weights"]["processed"] == sum(
        [shown["weights"][part] for part in ("embedding", "head", "dense")]
        + [path["processed"] for path in shown["weights"]["experts"]]
    )
    windows = (127 + 2 * 8192 - 2) // 8 + 2  # pages of a window and two steps in sliding layers, wherever they begin
    assert shown["kv_cache"]["tokens"] == 8 * (shown["kv_cache"]["pages"] - windows)
    assert list(shown["requests_by_context_length"]) == ["1024", "2000"]
    assert shown["max_model_len"] == 2000
    assert shown["refusal"] is None


def test_a_cpu(capsys):
    assert cli.main(["plan", "--gpu", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tiny-gpt-oss on cpu: ")
    assert "may be used" not in shown
    assert "6 layers, mxfp4 as torch" in shown


def test_a_machine_that_is_too_small(capsys, gpt_oss, monkeypatch):
    monkeypatch.setattr("engine.plan.usable_bytes", lambda: 12 << 30)
    flags = ["plan", "--gpu", "cpu", "--model", str(gpt_oss)]
    assert cli.main(flags) == 1
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown
    assert "does not fit: the memory of this machine, or of this container, is 12.0 GiB for each rank, but" in shown


def test_a_gpu_that_is_too_small(capsys, gpt_oss):
    assert cli.main(["plan", "--model", str(gpt_oss), "--gpu-memory", "12"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit: gpu_memory_utilization is 0.9: of 12.0 GiB it allows 10.8" in shown
    assert "DOES NOT FIT" in shown
    assert "context length" not in shown


def test_weights_that_fit_only_once_they_are_loaded(capsys, gpt_oss):
    """A table of requests would be of a start that runs out of memory."""
    flags = ["--gpu-memory", "13.8", "--gpu-memory-utilization", "1", "--enforce-eager", "--max-num-seqs", "1"]
    flags += ["--max-num-batched-tokens", "64", "--model", str(gpt_oss), "--moe-backend", "torch"]
    assert cli.main(["plan", *flags]) == 1
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown
    assert "does not fit: the weights do not fit while they are loaded: 700.0 MiB of 13.8 GiB are in use" in shown
    assert "context length" not in shown
    assert cli.main(["plan", "--json", *flags]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["refusal"].startswith("the weights do not fit while they are loaded")
    assert (document["weights"]["fits_while_loading"], document["kv_cache"]["pages"]) == (False, 0)


def test_pages_that_this_machine_cannot_hold(capsys):
    assert cli.main(["plan", "--gpu", "cpu", "--num-pages", "100000000"]) == 1
    assert "does not fit: num_pages is 100000000: KV pages of 98304 bytes, " in capsys.readouterr().out


def test_requests_are_those_of_one_data_parallel_rank(capsys):
    flags = ["plan", "--data-parallel-size", "2", "--expert-parallel-size", "2"]
    assert cli.main(flags) == 0
    words = "requests at the same time on each of 2 data-parallel ranks, at most 64 (--max-num-seqs)"
    assert words in capsys.readouterr().out
    assert cli.main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data_parallel_size"] == 2


@rows(
    "argv, words",
    (["--gpu", "abacus"], "--gpu: 'abacus' is not one of a100, h100"),
    (["--gpu-memory", "-1"], "--gpu-memory: -1.0"),
    (["--gpu-memory", "nan"], "--gpu-memory: nan"),
    (["--gpu-memory", "x"], "--gpu-memory: invalid float value: 'x'"),
    (["--max-num-seq", "1"], "did you mean --max-num-seqs?"),
    (["--max-model-len", "5000"], "max_model_len is 5000: this model was made for at most 4096 tokens"),
    (["--max-num-seqs", "0"], "max_num_seqs is 0"),
    (["--moe-backend", "deep_gemm"], "--moe-backend deep_gemm cannot run mxfp4 experts on sm90"),
    (["--attention-backend", "flashinfer"], "it serves latent attention (MLA) alone"),
    (["--gpu", "cpu", "--attention-backend", "triton"], "it needs a CUDA device, not cpu"),
    (["--enable-single-batch-overlap"], "--moe-a2a-backend none has no combine that takes signals"),
    (["--gpu", "cpu", "--device", "cuda:5"], "device is cuda:5: leave it out, since --gpu cpu says"),
    (["--device", "cpu"], "device is cpu: leave it out, since --gpu h100 says"),
    (["--model", "/nope"], "--model: '/nope' does not exist"),
    (["--model", str(ROOT / "docs")], "config.json"),
)
def test_refusals(capsys, argv, words):
    assert cli.main(["plan", *argv]) == 2
    caught = capsys.readouterr()
    assert words in caught.err
    assert caught.out == ""


def test_no_weights_are_read(monkeypatch, capsys):
    monkeypatch.setattr(SafetensorsFile, "view", lambda _self, name: pytest.fail(f"{name} was read"))
    assert cli.main(["plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"]["from_headers"]


def test_help_imports_nothing_heavy():
    code = "import sys; from server import cli\ntry: cli.main(['plan', '--help'])\nexcept SystemExit: pass\n"
    code += "print({'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--gpu-memory" in done.stdout
    assert f"--gpu GPU {', '.join(GPUS)}, or cpu" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "set()"
