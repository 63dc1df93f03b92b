"""What the start says at ready, to people and to programs."""

import io
import json

import msgspec

from server.ready import Ready, describe_checks, summarize_paths
from tests.server.conftest import FakeEngine


class Terminal(io.StringIO):
    def isatty(self):
        return True


INFO = msgspec.structs.replace(
    FakeEngine().info, moe_paths=[f"layer {index}: torch / none / mxfp4" for index in range(6)], weight_bytes=3 << 30,
    kv_cache_bytes=512 << 20,
)  # fmt: skip
READY = Ready(names=("a/b", "c"), url="http://[::1]:80", seconds=4.25, info=INFO)


def test_a_terminal_gets_lines_in_colour(monkeypatch):
    text = READY.text_for(Terminal(), "text")
    assert "\x1b[1;32ma/b, c ready at http://[::1]:80/v1 after 4.2 s\x1b[0m" in text
    monkeypatch.setenv("NO_COLOR", "1")
    lines = READY.text_for(Terminal(), "text").splitlines()
    assert [line.split("\x1b[0m")[-1].strip() for line in lines if "self-check" in line or "memory" in line] == [
        "1 of 6 MoE layers compared with the reference, largest error 2.0e-06 of 1e-05 allowed",
        "weights 3.0 GiB, KV cache 512.0 MiB",
    ]


def test_what_is_no_terminal_gets_one_line_of_json():
    for stream, log_format in ((io.StringIO(), "text"), (Terminal(), "json")):
        line = READY.text_for(stream, log_format)
        assert line.count("\n") == 1
        assert json.loads(line) == {
            "event": "ready", "message": "a/b, c ready at http://[::1]:80/v1 after 4.2 s", "url": "http://[::1]:80/v1",
            "models": ["a/b", "c"], "seconds": 4.2, "device": "cpu", "dtype": "float32", "ranks": 1,
            "moe": "6 MoE layers by torch / none / mxfp4",
            "selfcheck": {"layers": 1, "worst_error": 2e-6, "tolerance": 1e-5}, "weight_bytes": 3 << 30,
            "kv_cache_bytes": 512 << 20, "kv_cache_tokens": 1600, "max_model_len": INFO.max_model_len,
        }  # fmt: skip


def test_what_was_left_out_is_said():
    nothing = msgspec.structs.replace(INFO, selfcheck=[], moe_paths=[])
    assert describe_checks(nothing) == "off: no layer was compared with the reference"
    assert summarize_paths(nothing) == "no MoE layers"
    ready = Ready(names=("m",), url="http://x", seconds=1, info=nothing, num_ranks=4)
    assert ready.as_json()["selfcheck"] == {"layers": 0, "worst_error": None, "tolerance": None}
    assert dict(ready.rows())["memory"] == "weights 3.0 GiB, KV cache 512.0 MiB on each of 4 ranks"
