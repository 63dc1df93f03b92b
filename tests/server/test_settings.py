"""Settings: flags, variables and file; refusals name what is wrong; the command starts quickly and fails politely."""

import math
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from engine.config import EngineConfig
from engine.setting import check_settings, setting
from moe.config import MoeA2ABackend, MoeBackend
from moe.dispatch.deepep_settings import DeepepMode
from scripts.write_settings_page import PAGE, settings_page
from server import cli
from server.config import ServerConfig
from server.errors import SettingError
from server.service_links import service_links
from server.settings import gather, make_parser, settings_of
from tests.server.conftest import ASSETS
from tests.tables import rows

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = cli.all_settings()


def values_of(argv=(), environ=None):
    return gather(SETTINGS, vars(make_parser(SETTINGS, "moe-serve", "").parse_args(argv)), environ or {})


def configs_of(argv=(), environ=None):
    return cli.make_configs(SETTINGS, values_of(argv, environ))[:2]


def test_every_field_is_a_documented_setting_and_they_are_few():
    names = {field.name for cls in (ServerConfig, EngineConfig) for field in fields(cls)}
    assert names == set(SETTINGS)
    assert len(names) < 90


def test_the_page_of_settings_is_written_from_the_declarations():
    assert PAGE.read_text() == settings_page(SETTINGS.values()), "run `make pages`"


def test_a_field_must_be_declared_by_setting():
    @dataclass(frozen=True, kw_only=True)
    class Config:
        max_num_seqs: int = 64

    with pytest.raises(ValueError, match="max_num_seqs is not declared by `setting`"):
        settings_of(Config)


def test_one_declaration_makes_flag_variable_key_help_and_check(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_cats: int = setting(2, "engine", "cats, 50% of them black", low=1, high=9)
        weight_kg: float | None = setting(None, "model", "of a cat", above=0, default_text="a guess")
        speed: float = setting(1.0, "engine", "of a cat", low=0)
        dogs: int = setting(0, "engine", "that chase them")
        mood: Literal["calm", "wild"] = setting("calm", "engine", "how it behaves")
        purrs: bool = setting(True, "engine", "whether it does")

        def __post_init__(self):
            check_settings(self, SettingError)

    settings = settings_of(Config)
    assert list(settings) == ["weight_kg", "num_cats", "speed", "dogs", "mood", "purrs"], "sorted by group"
    parser = make_parser(settings, "cat", "")
    assert "cats, 50% of them black [2]" in parser.format_help()
    assert "--weight-kg KG of a cat [a guess]" in " ".join(parser.format_help().split())
    assert "--mood {calm,wild}" in parser.format_help()
    (tmp_path / "file.yaml").write_text("mood: wild\nnum_cats: 3")
    flags = vars(parser.parse_args(["--no-purrs", "--config", str(tmp_path / "file.yaml")]))
    values = gather(settings, flags, {"MOE_SERVE_NUM_CATS": "9"})
    assert Config(**values) == Config(num_cats=9, mood="wild", purrs=False)
    for wrong, message in (
        ({"num_cats": 0}, "num_cats is 0: it must lie between 1 and 9"),
        ({"num_cats": 10}, "num_cats is 10: it must lie between 1 and 9"),
        ({"weight_kg": 0.0}, "weight_kg is 0.0: it must be above 0"),
        ({"weight_kg": math.inf}, "weight_kg is inf: it must be at most 1000000000"),
        ({"speed": math.nan}, "speed is nan: it must be at most 1000000000"),
        ({"dogs": 10**20}, f"dogs is {10**20}: it must be at most 2147483647"),
        ({"speed": 1e300}, "speed is 1e+300: it must be at most 1000000000"),
        ({"mood": "tired"}, "mood is 'tired': it must be one of calm, wild"),
    ):
        with pytest.raises(SettingError) as caught:
            Config(**wrong)
        assert str(caught.value) == message


@rows("name", *(name for name, known in SETTINGS.items() if known.kind in (int, float)))
def test_every_number_has_an_upper_bound(name):
    """10^20 overflows in libraries, 10^300 seconds are no limit any more."""
    kind = SETTINGS[name].kind
    cls = next(cls for cls in (ServerConfig, EngineConfig) if name in {field.name for field in fields(cls)})
    needed = {"model": ASSETS} if cls is EngineConfig else {}
    with pytest.raises(ValueError, match=f"^{name} is 1.*: it must .*(at most|between)"):
        cls(**needed, **{name: 10**20 if kind is int else 1e300})


def test_choices_are_those_of_the_packages_below():
    assert SETTINGS["moe_backend"].choices == tuple(MoeBackend)
    assert SETTINGS["moe_a2a_backend"].choices == tuple(MoeA2ABackend)
    assert SETTINGS["deepep_mode"].choices == tuple(DeepepMode)
    for name, known in SETTINGS.items():
        for choice in known.choices if name in {field.name for field in fields(EngineConfig)} else ():
            EngineConfig(model=ASSETS, **{name: choice})


def test_defaults_come_from_the_dataclasses():
    server, engine = configs_of()
    assert server == ServerConfig(served_model_name=("tiny-gpt-oss",))
    assert engine == EngineConfig(model=ASSETS)


def test_tuning_is_off_and_keeps_its_results_in_the_users_cache_folder(tmp_path):
    for environ, folder in (
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/a"}, Path("/cache/moe-serve/tune")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, Path("/home/a/.cache/moe-serve/tune")),
        ({"HOME": "/home/a"}, Path("/home/a/.cache/moe-serve/tune")),
        ({}, None),
    ):
        assert cli.tune_cache_folder(environ) == folder
    assert not configs_of()[1].tune
    assert configs_of(["--tune"])[1].tune
    assert configs_of([], {"MOE_SERVE_TUNE": "yes"})[1].tune
    assert not configs_of(["--no-tune"], {"MOE_SERVE_TUNE": "yes"})[1].tune
    assert configs_of(["--tune-cache-dir", str(tmp_path)])[1].tune_cache_dir == tmp_path
    assert configs_of([], {"MOE_SERVE_TUNE_CACHE_DIR": "none"})[1].tune_cache_dir is None


def test_the_command_hands_the_folder_to_the_engine(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("server.service.run", lambda server, engine, listener: seen.append(engine) or 0)
    assert cli.main(["--port", "0"]) == 0
    assert cli.main(["--port", "0", "--tune-cache-dir", "none"]) == 0
    assert [engine.tune_cache_dir for engine in seen] == [tmp_path / "moe-serve" / "tune", None]


def test_flag_beats_variable_beats_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nhost: from-file\nmax_num_seqs: 3\nserved_model_name: [a, b]\nrevision: null\n")
    environ = {"MOE_SERVE_PORT": "2", "MOE_SERVE_HOST": "from-variable", "OTHER": "x"}
    server, engine = configs_of(["--config", str(file), "--port", "3"], environ)
    assert (server.port, server.host, engine.max_num_seqs) == (3, "from-variable", 3)
    assert server.served_model_name == ("a", "b")
    assert configs_of([], environ | {"MOE_SERVE_CONFIG": str(file)})[1].max_num_seqs == 3


def test_types():
    server, engine = configs_of(
        ["--access-log", "--no-enable-prefix-caching", "--drain-timeout", "1.5", "--max-model-len", "none"],
        {"MOE_SERVE_SEED": "-3", "MOE_SERVE_SERVED_MODEL_NAME": "a, b"},
    )
    assert (server.access_log, engine.enable_prefix_caching, server.drain_timeout) == (True, False, 1.5)
    assert (engine.max_model_len, engine.seed, server.served_model_name) == (None, -3, ("a", "b"))
    assert configs_of([], {"MOE_SERVE_ACCESS_LOG": "yes"})[0].access_log


EXPLAIN = "explain --gpu sm90 --format mxfp4"


@rows(
    "line, advice",
    (
        "foo",
        "moe-serve takes flags, or a command first: bench, chat, completion, doctor, experts, explain, health, plan",
    ),
    ("bnech", "did you mean moe-serve bench?"),
    ("--port 1 health", "the command comes first: moe-serve health"),
    ("serve openai/gpt-oss-20b", "did you mean --model openai/gpt-oss-20b?"),
    ("docs", "did you mean --model docs?"),  # a folder
    ("bench foo", "moe-serve bench takes flags, or a command first: plot"),
    ("bench plots", "did you mean moe-serve bench plot?"),
    ("bench http://a:1", "did you mean --base-url http://a:1?"),
    ("plan foo", "moe-serve plan takes flags only"),
    ("plan a/b", "did you mean --model a/b?"),
    ("plan --jsn", "did you mean --json?"),
    ("doctor foo", "moe-serve doctor takes flags only"),
    ("experts load.json", "moe-serve experts takes flags only"),
    ("experts --recrod load.json", "did you mean --record?"),
    ("health http://a:1", "the address is given by --host and --port"),
    ("chat hello", "moe-serve chat takes flags only"),
    (f"{EXPLAIN} foo", "moe-serve explain takes flags only"),
    (f"{EXPLAIN} a/b", "did you mean --model a/b?"),
)
def test_what_is_not_known_gets_advice_that_holds(line, advice, capsys, monkeypatch):
    monkeypatch.chdir(ASSETS.parents[1])
    assert cli.main(line.split()) == cli.USAGE_ERROR
    assert f"; {advice}; --help lists all flags" in capsys.readouterr().err


@rows(
    "argv, environ, words",
    (["--prot", "1"], {}, "unrecognized arguments: --prot 1; did you mean --port?; --help lists all flags"),
    (["--max-num-sequences=8"], {}, "--max-num-sequences=8; did you mean --max-num-seqs?"),
    (["models/gpt-oss"], {}, "unrecognized arguments: models/gpt-oss; did you mean --model models/gpt-oss?"),
    (["--zzz"], {}, "unrecognized arguments: --zzz; --help lists all flags"),
    (["--max-num-s", "1"], {}, "--max-num-s"),
    (["--port", "99999"], {}, "--port: port is 99999"),
    (["--port", "x"], {}, "--port: 'x' is not a whole number"),
    (["--port"], {}, "--port: expected one argument"),
    (["--moe-backend", "x"], {}, "--moe-backend: 'x' is not one of auto, torch"),
    (["--max-num-seqs", "0"], {}, "--max-num-seqs: max_num_seqs is 0"),
    (["--device", "x"], {}, "--device: device is 'x'"),
    (["--api-key", ""], {}, "--api-key: api_key is empty"),
    (["--api-key", "schlüssel"], {}, "--api-key: api_key is empty or holds spaces or characters beyond ASCII"),
    ([], {"MOE_SERVE_API_KEY": "key\n"}, "--api-key: api_key is empty or holds spaces"),
    (["--drain-timeout", "nan"], {}, "--drain-timeout: drain_timeout is nan"),
    (["--drain-timeout", "inf"], {}, "--drain-timeout: drain_timeout is inf"),
    (["--heartbeat-timeout", "nan"], {}, "--heartbeat-timeout: heartbeat_timeout is nan"),
    (["--num-threads", "100000"], {}, "--num-threads: num_threads is 100000: it must lie between 1 and 1024"),
    (["--master-addr", "no..such"], {}, "master_addr is 'no..such': it must be the name or IP address of a host"),
    (["--max-model-len", "1"], {}, "--max-model-len: max_model_len is 1: it must be at least 2"),
    (["--served-model-name", "a,,b"], {}, "--served-model-name"),
    (["--served-model-name", "a,b,a"], {}, "--served-model-name: served_model_name holds 'a' twice"),
    (["--default-temperature", "3"], {}, "--default-temperature"),
    ([], {"MOE_SERVE_POTR": "1"}, "MOE_SERVE_POTR: there is no such setting; did you mean MOE_SERVE_PORT?"),
    ([], {"MOE_SERVE_PORT": "x"}, "MOE_SERVE_PORT: 'x' is not a whole number"),
    ([], {"MOE_SERVE_API_KEY": ""}, "MOE_SERVE_API_KEY is empty"),  # G03: fail closed
    (["--cors-origins", "example.com"], {}, "--cors-origins: cors_origins holds 'example.com'"),
    (["--cors-origins", "https://a.b, https://c.d/"], {}, "--cors-origins: cors_origins holds 'https://c.d/'"),
    (["--stall-timeout", "0"], {}, "--stall-timeout: stall_timeout is 0"),
    (["--model", ""], {}, "--model: '' does not exist"),
    ([], {"MOE_SERVE_ACCESS_LOG": "maybe"}, "MOE_SERVE_ACCESS_LOG: 'maybe' is not true or false"),
    (["--config", "/nope.yaml"], {}, "--config: /nope.yaml cannot be read"),
)
def test_refusals_name_their_source(argv, environ, words):
    with pytest.raises(SettingError) as caught:
        configs_of(argv, environ)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


LINKS = {
    f"MOE_SERVE_{name}": text
    for middle in ("", "CANARY_")
    for name, text in {
        f"{middle}SERVICE_HOST": "10.96.0.12",
        f"{middle}SERVICE_PORT": "8000",
        f"{middle}SERVICE_PORT_HTTP": "8000",
        f"{middle}PORT": "tcp://10.96.0.12:8000",
        f"{middle}PORT_8000_TCP": "tcp://10.96.0.12:8000",
        f"{middle}PORT_8000_TCP_PROTO": "tcp",
        f"{middle}PORT_8000_TCP_PORT": "8000",
        f"{middle}PORT_8000_TCP_ADDR": "fd00::c",
        f"{middle}PORT_53_UDP": "UDP://10.96.0.12:53",
    }.items()
}


def test_variables_of_kubernetes_services_are_no_settings_g03(monkeypatch, caplog):
    """With a Service called moe-serve or moe-serve-canary, every start used to end with status 2."""
    seen = []
    monkeypatch.setattr("server.service.run", lambda server, engine, listener: seen.append((server, engine)) or 0)
    monkeypatch.setattr(cli, "bind", lambda host, port: nullcontext())
    for name, text in {**LINKS, "MOE_SERVE_MAX_NUM_SEQS": "3"}.items():
        monkeypatch.setenv(name, text)
    with caplog.at_level("INFO"):
        assert cli.main(["--host", "localhost"]) == 0
        assert cli.main(["--host", "localhost", "--port", "0"]) == 0
    assert [(server.port, engine.max_num_seqs) for server, engine in seen] == [(8000, 3), (0, 3)]
    lines = [record.getMessage() for record in caplog.records if record.name == "server.cli"]
    assert len(lines) == 2
    assert all(name in lines[0] for name in LINKS)


def test_a_setting_is_never_taken_for_a_service_g03():
    for text in ("", "8000", "x", "tcp"):
        assert service_links({setting.variable: text for setting in SETTINGS.values()}) == []
    assert service_links({"MOE_SERVE_PROT": "8000", "MOE_SERVE_PORT": "tcp:8000", "MOE_SERVE_SERVICE_PORT": "x"}) == []
    with pytest.raises(SettingError, match="MOE_SERVE_PORT: 'tcp:8000'"):
        values_of([], {"MOE_SERVE_PORT": "tcp:8000"})


def test_an_empty_variable_is_unset_g03(tmp_path):
    names = {setting.variable for setting in SETTINGS.values() if not setting.spec.is_secret}
    assert values_of([], dict.fromkeys({*names, "MOE_SERVE_CONFIG"}, "")) == {}
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1")
    assert values_of(["--config", str(file)], {"MOE_SERVE_PORT": "", "MOE_SERVE_CONFIG": ""}) == {"port": 1}


def test_a_variable_that_a_flag_overrides_is_not_parsed_g03():
    environ = {"MOE_SERVE_PORT": "x", "MOE_SERVE_API_KEY": "", "MOE_SERVE_TUNE": "maybe", "MOE_SERVE_CONFIG": "/nope"}
    with pytest.raises(SettingError, match="/nope cannot be read"):
        values_of(["--port", "1", "--api-key", "k", "--no-tune"], environ)
    del environ["MOE_SERVE_CONFIG"]
    given = values_of(["--port", "1", "--api-key", "k", "--no-tune"], environ)
    assert given == {"port": 1, "api_key": "k", "tune": False}


@rows(
    "content, words",
    ("prot: 1", "'prot'; did you mean port?"),
    ("port: 1.5", "port: '1.5' is not a whole number"),
    ("port: true", "port: 'true' is not a whole number"),
    ("- port", "keys and values"),
    ("port: [", "cannot be read"),
    ("port: 2001-99-99", "port: '2001-99-99' is not a whole number"),
    ('port: !!int "x"', "port: 'x' is not a whole number"),
    ("port: {a: 1}", "port must hold one value, or a list of values"),
    ("served_model_name: [a, [b]]", "served_model_name must hold one value, or a list of values"),
    ("served_model_name: &a [*a]", "served_model_name must hold one value, or a list of values"),
    ("served_model_name: [a, ~]", "served_model_name must hold one value, or a list of values"),
    ("host: [a, b]", "host: ['a', 'b'] is not text"),
    ("port: 1\nhost: a\nport: 2", "gives port twice"),
    ("port: 1\n---\nport: 2", "cannot be read"),
    ("? [port]\n: 1", "there is no setting"),
    ("[" * 5000, "cannot be read"),
    ("host:", "host has no value"),
    ("model: null", "model has no value"),
    ("api_key:", "api_key has no value"),
    ("api_key: ~", "api_key has no value"),
)
def test_refusals_of_a_file(tmp_path, content, words):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(SettingError) as caught:
        values_of(["--config", str(file)])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_of_a_file_are_those_that_are_written(tmp_path):
    """YAML reads 012 as 10, 1_000 as 1000 and 1.10 as 1.1: another key than the written one opened the service."""
    file = tmp_path / "settings.yaml"
    for written, text in (("012", "012"), ("1_000", "1_000"), ("0x1F", "0x1F"), ("1e3", "1e3"), ("yes", "yes")):
        file.write_text(
            f"api_key: {written}\nserved_model_name: [1.10, {written}]\nhost: {written}\ntune: yes\nport: 8_0\n"
        )
        values = values_of(["--config", str(file)])
        expected = {"host": text, "served_model_name": ("1.10", text), "tune": True, "port": 80}
        assert values == {**expected, "api_key": values_of(["--api-key", text])["api_key"]}


def test_two_dataclasses_must_not_share_a_field():
    with pytest.raises(ValueError, match="two dataclasses"):
        settings_of(ServerConfig, ServerConfig)


def run_command(*argv):
    return subprocess.run(
        [sys.executable, "-m", "server", *argv], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


def test_bad_starts_end_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("server.service.run", lambda *_configs: pytest.fail("it has started"))
    done = run_command("--port", "x")
    ended = [(["--port", "x"], "--port", 2, done.returncode, done.stdout, done.stderr)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for argv, words, wanted in [
            (["--model", "/does/not/exist"], "--model: '/does/not/exist' does not exist", 2),
            (["--model", str(tmp_path)], "not a checkpoint", 2),
            (["--model", str(ROOT / "pyproject.toml")], "is a file", 2),
            (["--port", str(port)], f"cannot listen on 127.0.0.1:{port}: address already in use", 1),
            (["--host", "no.such.host.invalid"], "--host", 2),
            (["--host", "a" * 70], "label too long", 2),
            (["--host", "a..b"], "label empty or too long", 2),
        ]:
            ended.append((argv, words, wanted, cli.main(argv), *capsys.readouterr()))
    for argv, words, wanted, status, out, err in ended:
        assert (status, out, err.count("\n")) == (wanted, "", 1), (argv, err)
        assert err.startswith("moe-serve: --")
        assert words in err


def test_help_lists_all_flags_and_imports_nothing_heavy():
    """`server.service` too: it starts the engine's process before it imports the web framework."""
    done = run_command("--help")
    assert done.returncode == 0
    for known in SETTINGS.values():
        assert known.flag in done.stdout
    probe = (
        "import sys; from server import cli, service; cli.main(['--version']); "
        "print({'torch', 'fastapi'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert done.stdout.startswith("moe-serve ")


def test_help_shows_a_part_by_its_heading(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help", "RANKS"])
    shown = capsys.readouterr().out
    assert shown.startswith("several ranks:\n  --tensor-parallel-size")
    assert "--port" not in shown
    assert cli.main(["--help", "nonsense"]) == 2
    assert "no heading has 'nonsense'; the headings are options, commands, model, HTTP" in capsys.readouterr().err
