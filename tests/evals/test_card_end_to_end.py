"""`scripts/card_end_to_end.py` as far as a CPU can run it: its report, its failures, and a dummy model's answers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from scripts import card_end_to_end as card
from tests.server.conftest import wait_until

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 64, "num_local_experts": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 20000,
}  # fmt: skip
NUM_OWN_TOKENS = 4096  # of the bundled tokenizer


def run(out: Path, *flags: str) -> tuple[int, list[dict]]:
    status = card.main(["--out", str(out), "--device", "cpu", "--reference-threads", "1", *flags])
    report = json.loads((out / "report.json").read_text())
    assert report["passed"] is (status == 0)
    return status, report["rows"]


@pytest.mark.timeout(300)  # three services and three evals, one after the other
@pytest.mark.evals
def test_the_bundled_model_agrees_with_itself_and_a_missing_card_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, [reference, torch, triton] = run(tmp_path, "--parts", "tiny", "--items", "90", "--backends", "torch,triton")
    assert status == 1
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[:3]] == ["ok:", "ok:", "FAILED:"]
    for row in (reference, torch):
        assert (row["passed"], row["items"], row["paths"]) == (True, 90, {"torch / none / mxfp4": 6})
        assert [check["layer"] for check in row["selfcheck"]] == list(range(6))
        assert row["right"] >= 80
    assert (torch["agreement"], torch["same_answer"], torch["same_verdict"]) == (1.0, 90, 90)
    assert triton["passed"] is False
    assert "--moe-backend triton cannot run mxfp4 experts on cpu" in triton["error"]


@pytest.mark.evals
def test_a_dummy_model_of_gpt_oss_shape_starts_and_answers(tmp_path: Path) -> None:
    flags = ["--parts", "dummy", "--dummy-backends", "auto", "--dummy-config", json.dumps(SMALL)]
    status, [row] = run(tmp_path, *flags)
    assert status == 0
    assert row["layers"] == ["layer 0: torch / none / mxfp4", "layer 1: torch / none / mxfp4"]
    assert (row["finish_reason"], row["answer_tokens"]) == ("length", card.ANSWER_TOKENS)
    config = json.loads((tmp_path / "gpt-oss-20b" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_a_mistyped_part_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        card.main(["--out", str(tmp_path / "new"), "--parts", "tiny,dumy"])
    assert stopped.value.code == 2
    assert "--parts dumy: known are tiny, settings, dummy" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_folder_may_be_used_again(tmp_path: Path) -> None:
    card.write_dummy_model(tmp_path / "model", hidden_size=64)
    model = card.write_dummy_model(tmp_path / "model", **SMALL)
    assert json.loads((model / "config.json").read_text())["hidden_size"] == 96


@pytest.mark.processes
def test_a_script_that_is_told_to_end_takes_its_server_along(tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path), "--device", "cpu", "--parts", "dummy", "--dummy-backends", "auto"]
    command = [sys.executable, card.__file__, *flags, "--dummy-config", json.dumps(SMALL)]
    with subprocess.Popen(command, start_new_session=True) as script:
        log = tmp_path / "dummy-auto.log"
        wait_until(lambda: script.poll() is not None or (log.exists() and log.stat().st_size > 0), timeout_s=100)
        script.terminate()
        assert script.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not has_processes(script.pid), timeout_s=30)


def has_processes(group: int) -> bool:
    """Also those that have ended and that nobody has reaped yet."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.processes
def test_tokens_that_the_tokenizer_does_not_have_are_empty_text(tmp_path: Path) -> None:
    """With random weights most of a large vocabulary is beyond the bundled tokenizer: nothing to show, no failure."""
    model = card.write_dummy_model(tmp_path / "model", **SMALL)
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--num-threads", "1"]
    with (
        card.service(tmp_path / "log", *flags) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        name = client.models.list().data[0].id
        request = {"model": name, "prompt": "Hello", "max_tokens": 20, "temperature": 0, "logprobs": 5}
        unknown = {str(token): 100 for token in range(NUM_OWN_TOKENS, NUM_OWN_TOKENS + 20)}
        [whole] = client.completions.create(**request, logit_bias=unknown).choices
        assert (whole.text, whole.finish_reason) == ("", "length")
        assert whole.logprobs.tokens == [""] * 20
        [mixed] = client.completions.create(**request, logit_bias=unknown | {"100": 100, "101": 100}).choices
        streamed = client.completions.create(**request, logit_bias=unknown | {"100": 100, "101": 100}, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == mixed.text
        chat = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
        [choice] = client.chat.completions.create(**chat, temperature=0, logprobs=True, logit_bias=unknown).choices
        assert (choice.message.content, choice.finish_reason) == (None, "length")
