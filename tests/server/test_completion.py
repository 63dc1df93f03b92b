"""`moe-serve completion`: the script for bash completes in bash; those for zsh and fish know the same words."""

import subprocess

import pytest

from server import cli
from server.completion import SHELLS, parser_of_commands, whole_parser
from server.errors import SettingError

SETTINGS = cli.all_settings()
TYPED = {
    "ch": {"chat"},
    "--moe-backend tri": {"triton"},
    "--max-num-s": {"--max-num-seqs"},
    "plan --gpu-m": {"--gpu-memory", "--gpu-memory-utilization"},
    "bench --endpoint c": {"chat", "completions"},
    "experts --reco": {"--record"},
    "completion z": {"zsh"},
    "--config /etc/passw": {"/etc/passwd", "/etc/passwd-"},
}


def script(capsys, shell):
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes(capsys, subtests):
    asked = "\n".join(
        f"COMP_WORDS=(moe-serve {line}); COMP_CWORD={len(line.split())}; COMPREPLY=(); "
        f'_shtab_moe_serve "" "{line.split()[-1]}"; echo "${{COMPREPLY[*]}}"'
        for line in TYPED
    )
    done = subprocess.run(
        ["bash", "-c", f"{script(capsys, 'bash')}\n{asked}"], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == len(TYPED)
    for (line, wanted), found in zip(TYPED.items(), done.stdout.splitlines(), strict=True):
        with subtests.test(line):
            assert found.split(), line
            assert set(found.split()) <= wanted


def test_every_shell_knows_every_flag_and_command(capsys):
    whole = whole_parser("moe-serve", SETTINGS, cli.COMMANDS)
    assert parser_of_commands(whole).keys() == cli.COMMANDS.keys()
    for shell in SHELLS:
        text = script(capsys, shell)
        words = {name.lstrip("-") if shell == "fish" else name for name in whole._option_string_actions}
        assert {word for word in {*words, *cli.COMMANDS} if word not in text} == set()


def test_another_shell_is_refused_by_name():
    with pytest.raises(SettingError, match="invalid choice: 'tcsh'"):
        cli._run_command("completion", ["tcsh"], SETTINGS, {})
