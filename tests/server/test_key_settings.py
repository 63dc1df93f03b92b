"""Keys as settings: given by a flag or in a file, with limits of their own, and what is refused."""

from pathlib import Path

import pytest

from server import cli
from server.config import ServerConfig
from server.errors import SettingError
from tests.server.test_settings import SETTINGS
from tests.tables import rows


@rows(
    "text, keys",
    ("one\n\n# comment\n  two  \n", ["flag", "one", "two"]),
    ("one", ["flag", "one"]),
)
def test_a_file_adds_keys(text, keys, tmp_path):
    file = tmp_path / "keys"
    file.write_text(text)
    values = {"model": "openai/gpt-oss-20b", "api_key": "flag", "api_key_file": file}
    assert [key.text for key in cli.make_configs(SETTINGS, values)[0].api_keys] == keys
    del values["api_key"]
    assert [key.text for key in cli.make_configs(SETTINGS, values)[0].api_keys] == keys[1:]


def test_keys_may_have_limits_of_their_own(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\ntwo  tokens_per_minute=60 max_requests=4\nthree max_requests=none\n")
    values = {"model": "openai/gpt-oss-20b", "api_key_file": file, "max_requests_per_key": 2}
    keys = cli.make_configs(SETTINGS, values)[0].api_keys
    limits = [(key.text, key.max_requests, key.tokens_per_minute) for key in keys]
    assert limits == [("one", 2, None), ("two", 4, 60), ("three", None, None)]


@rows(
    "settings, error",
    ({"api_key": "a,,b"}, "api_key 2 is empty"),
    ({"api_key": "a,b max_requests=0"}, "api_key 2 holds a space: only max_requests=N"),
    ({"api_key": "a max_requests=2 max_requests=3"}, "api_key holds a space: .* once"),
    ({"api_key": "two words"}, "api_key holds a space"),
    ({"admin_key": "a max_requests=2"}, "admin_key is empty or holds spaces"),
    ({"api_key": "a,b,a"}, "api_key holds a key twice"),
    ({"admin_key": ""}, "admin_key is empty"),
    ({"api_key": "a,b", "admin_key": "b"}, "admin_key is one of the keys"),
    ({"max_requests_per_key": 1}, "max_requests_per_key needs keys"),
    ({"tokens_per_minute_per_key": 1, "admin_key": "a"}, "tokens_per_minute_per_key needs keys"),
    ({"ssl_keyfile": Path("x")}, "set ssl_certfile"),
)
def test_settings_that_would_not_protect_are_refused(settings, error):
    with pytest.raises(SettingError, match=error):
        ServerConfig(**settings)


@rows(
    "text, words",
    ("", " holds no key"),
    ("# none\n", " holds no key"),
    ("schlüssel\n", " cannot be read"),
    ("one\n\nwith space\n", ", line 3, holds a space"),
    ("one,,two\n", ", line 1, is empty"),
)
def test_a_file_without_fit_keys_is_refused(text, words, tmp_path):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingError, match=f"--api-key-file: api_key_file {file}{words}"):
        cli.make_configs(SETTINGS, {"model": "openai/gpt-oss-20b", "api_key_file": file})
