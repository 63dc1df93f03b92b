"""A checkpoint's small files: sampling defaults, tokenizer, chat template. Damage is named before the start."""

import codecs
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from server.errors import BadRequest, SettingError
from server.model_files import check_servable, read_model_files
from server.model_source import check_model_folder
from server.prompt import ChatTemplate
from server.sampling_defaults import RANGES, SamplingDefaults, read_sampling_defaults
from server.schema.common import GenerationRequest
from tests.server.conftest import ASSETS
from tests.tables import rows

ROOT = Path(__file__).resolve().parents[2]


def test_sampling_defaults_of_a_checkpoint(subtests, tmp_path):
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    for content, expected in [
        ('{"temperature": 0.6, "top_p": 0.95, "eos_token_id": 1}', SamplingDefaults(temperature=0.6, top_p=0.95)),
        ('{"do_sample": false}', SamplingDefaults(temperature=0.0)),
        ('{"do_sample": false, "temperature": 0.6}', SamplingDefaults(temperature=0.0)),  # G30
        ('\ufeff{"do_sample": false, "temperature": 0.6, "top_p": 0.95}', SamplingDefaults(temperature=0, top_p=0.95)),
        ('{"do_sample": true, "temperature": 0.6}', SamplingDefaults(temperature=0.6)),
        ('{"top_k": -1, "top_p": 1, "temperature": 2}', SamplingDefaults(top_k=-1, top_p=1.0, temperature=2.0)),
        ('{"do_sample": true, "top_k": null}', SamplingDefaults()),
    ]:
        with subtests.test(content=content, expected=expected):
            (tmp_path / "generation_config.json").write_text(content)
            assert read_sampling_defaults(tmp_path) == expected


@rows(
    "content, words",
    ('{"temperature": -1}', "temperature is -1: it must be between 0 and 2"),
    ('{"temperature": "hot"}', 'temperature is "hot": it must be a number'),
    ('{"temperature": NaN}', "temperature is nan"),
    ('{"top_p": 0}', "top_p is 0: it must be above 0 and at most 1"),
    ('{"top_k": 0.5}', "top_k is 0.5: it must be an integer"),
    ('{"min_p": true}', "min_p is true: it must be a number"),
    ('{"repetition_penalty": 11, "do_sample": false}', "repetition_penalty is 11"),
    ('{"temperature": 3, "do_sample": false}', "temperature is 3"),
    ("[]", "must hold a JSON object"),
    ("{", "cannot be read as JSON"),
)
def test_sampling_defaults_that_a_request_could_not_have_are_refused_g30(tmp_path, content, words):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(SettingError, match=re.escape(words)) as caught:
        read_sampling_defaults(tmp_path)
    assert str(tmp_path / "generation_config.json") in str(caught.value)


@rows("name", *sorted(RANGES))
def test_ranges_of_defaults_are_those_of_the_api_g30(name):
    low, high = RANGES[name]
    step = 1 if name == "top_k" else 1e-9
    for value, is_allowed in ((low, True), (high, True), (low - step, False), (high + step, False)):
        fields = {name: value}
        if is_allowed:
            assert getattr(GenerationRequest(**fields), name) == value
        else:
            with pytest.raises(ValidationError):
                GenerationRequest(**fields)


@pytest.fixture
def model_folder(tmp_path):
    """A copy of the bundled model whose small files a test may change."""
    for path in ASSETS.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / path.name).symlink_to(path)
        else:
            shutil.copy(path, tmp_path)
    return tmp_path


@rows(
    "file, content, words",
    (
        "chat_template.jinja",
        "{{ bos_token }}\n{% for m in messages %}\n{{ m.content }",
        "line 3 of the chat template",
    ),
    ("chat_template.jinja", "a\n{% generation %}b", "line 2 of the chat template"),
    ("chat_template.jinja", "a\n\n{% no_such_tag %}", "line 3 of the chat template"),
    ("chat_template.jinja", "{{ 1 | no_such_filter }}", "line 1 of the chat template"),
    ("chat_template.jinja", b"\xff\xfe", "not UTF-8"),
    ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template[0] must be an object"),
    ("tokenizer_config.json", {"chat_template": ["text"]}, "chat_template[0] must be an object"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template must be text or a list"),
    ("tokenizer_config.json", {"chat_template": "{% if %}"}, "line 1 of the chat template"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"7": {}}}, "added_tokens_decoder[7] must be an object"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"7": "x"}}, "added_tokens_decoder[7] must be an object"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "y"}}}, "'x', which is not a token id"),
    ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object"),
)
def test_damaged_tokenizer_files_are_named_g29(model_folder, file, content, words):
    if file == "tokenizer_config.json":
        (model_folder / "chat_template.jinja").unlink(missing_ok=True)
    text = content if isinstance(content, bytes | str) else json.dumps(content)
    (model_folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingError, match=re.escape(words)) as caught:
        read_model_files(model_folder)
    assert str(caught.value).startswith(f"--model: {model_folder / file}: ")
    assert "\n" not in str(caught.value)


@rows(
    "file",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "hf_quant_config.json",
)
def test_a_link_that_leads_nowhere_is_no_absent_file(tmp_path, file):
    """A cache that lost a file: the model answered without its template, or with other sampling defaults."""
    folder = shutil.copytree(ASSETS, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)  # else transformers does not read the older files beside it
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    check_servable(folder)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to("../../blobs/pruned")
    with pytest.raises(SettingError, match=re.escape(f"--model: {folder / file}: ")):
        check_servable(folder)


@rows("template, is_warned", ("{{ bos_token }}", True), ("{{ messages[0].content }}", False))
def test_a_template_that_reads_a_bos_without_a_name_is_reported(model_folder, caplog, template, is_warned):
    """The model answers worse without the token, and nobody would know why."""
    (model_folder / "special_tokens_map.json").unlink(missing_ok=True)
    settings = model_folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": None}))
    (model_folder / "chat_template.jinja").write_text(template)
    read_model_files(model_folder)
    assert ("reads bos_token, but no file names one" in caplog.text) == is_warned


def test_a_folder_without_tokenizer_json_learns_what_is_read(model_folder):
    (model_folder / "tokenizer.json").rename(model_folder / "tiktoken.model")
    check_model_folder(model_folder)
    with pytest.raises(
        SettingError, match=r"only tokenizer\.json files are read, no SentencePiece or tiktoken files: take"
    ):
        read_model_files(model_folder)


def refused(model_folder, *flags):
    """The one line on standard error of a service that refuses its settings before the engine starts."""
    command = [sys.executable, "-m", "server", "--model", str(model_folder), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_a_damaged_template_is_refused_before_the_engine_starts_g29(model_folder):
    (model_folder / "chat_template.jinja").write_text("{% for %}")
    assert "line 1 of the chat template" in refused(model_folder)


@rows("value", "1", True)
def test_an_eos_id_that_is_none_is_refused_before_the_engine_starts(model_folder, value):
    path = model_folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value}))
    with pytest.raises(SettingError, match=re.escape(f"--model: {path}: key 'eos_token_id' ")):
        read_model_files(model_folder)


@rows("template", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('no') }}", "{{ 1 // 0 }}")
def test_a_template_that_refuses_one_conversation_may_take_others(model_folder, template):
    (model_folder / "chat_template.jinja").write_text(template)
    tokenizer = read_model_files(model_folder).tokenizer
    with pytest.raises(BadRequest, match="the model's chat template refuses them: "):
        ChatTemplate(tokenizer).render([{"role": "user", "content": "a"}], [], {})


@pytest.fixture
def folder_with_more_tokens(model_folder):
    """Its tokenizer has tokens that the model lacks."""
    path = model_folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    for token_id, content in ((4096, "<far>"), (4097, "<color>")):
        spec["added_tokens"].append({"id": token_id, "content": content, "special": content == "<far>", **flags})
    path.write_text(json.dumps(spec))
    return model_folder


def test_a_tokenizer_may_have_more_tokens_than_the_model(folder_with_more_tokens):
    assert read_model_files(folder_with_more_tokens).tokenizer.vocab_size == 4098


@rows(
    "at_fault, file, change",
    ("chat_template.jinja", "chat_template.jinja", lambda text: "<far>" + text),
    ("chat_template.jinja", "chat_template.jinja", lambda text: text + "<color>"),
    (
        "tokenizer.json",
        "tokenizer_config.json",
        lambda text: json.dumps(json.loads(text) | {"bos_token": "<far>", "add_bos_token": True}),
    ),
    ("tokenizer.json", "tokenizer.json", lambda text: text.replace('"<color>"', '"<｜end▁of▁sentence｜>"')),
)
def test_tokens_that_every_prompt_needs_must_be_the_models(folder_with_more_tokens, at_fault, file, change):
    """The service was ready, and every chat got a 400 that named the client's prompt."""
    (folder_with_more_tokens / "special_tokens_map.json").unlink(missing_ok=True)
    path = folder_with_more_tokens / file
    path.write_text(change(path.read_text()))
    words = (
        rf"{re.escape(str(folder_with_more_tokens / at_fault))}: it needs the token '<[^>]+>', whose id is 409[67], "
    )
    with pytest.raises(SettingError, match=f"--model: {words}but by vocab_size of config.json the model has ids 0 to"):
        read_model_files(folder_with_more_tokens)


def test_a_context_beyond_the_models_is_refused_before_the_engine_starts(model_folder):
    """Exit status 1 after all weights were loaded."""
    line = refused(model_folder, "--max-model-len", "5000")
    assert "max_model_len is 5000: this model was made for at most 4096 tokens; lower --max-model-len, or" in line


def test_a_byte_order_mark_is_no_part_of_a_file_g29(model_folder):
    plain = read_model_files(model_folder).tokenizer
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        path = model_folder / name
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    marked = read_model_files(model_folder).tokenizer
    assert marked.chat_template == plain.chat_template
    assert marked.encode("Paris is it.") == plain.encode("Paris is it.")
    assert marked.special_tokens == plain.special_tokens
