"""What a shell completes: commands, subcommands, options, config keys and their values."""

import shutil
import subprocess
import sys

import pytest

from meshwright.cli.completion import SHELLS, completions
from meshwright.cli.main import COMMANDS, main

CASES = [
    ("tra", ["train"]),
    ("checkpoint ver", ["verify"]),
    ("train run.toml layout.dp_", ["layout.dp_replicate=", "layout.dp_shard="]),
    ("plan cluster.preset=h100-", ["cluster.preset=h100-pcie", "cluster.preset=h100-sxm"]),
    ("train layout.sp=", ["layout.sp=false", "layout.sp=true"]),
    ("plan --pri", ["--price"]),
    ("checkpoint push --dry", ["--dry-run"]),
    ("train runs/", []),
    ("nonsense --", []),
]


@pytest.mark.parametrize(("line", "possible"), CASES)
def test_words_are_completed(line, possible):
    assert set(possible) <= set(completions(line.split(" ")))
    if not possible:
        assert completions(line.split(" ")) == []


def test_each_command_and_key_is_completed_to_what_it_accepts():
    assert set(completions([""])) == set(COMMANDS)
    assert completions(["train", ""]) == []  # a shell offers files
    for schedule in completions(["plan", "layout.schedule="]):
        assert main(["config", "show", schedule, "--json"]) in (0, 2)
    assert len(completions(["plan", "layout.schedule="])) == 8


def test_two_dashes_are_completed_to_options(capsys):
    assert main(["completion", "--words=plan\t--"]) == 0
    options = capsys.readouterr().out.splitlines()
    assert {"--html", "--top", "--json"} <= set(options)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Put `meshwright` on the path."""
    script = tmp_path / "bin" / "meshwright"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")


def test_bash_completes_what_follows_an_equals_sign(command, tmp_path):
    """Its own words end at "=", and `COMPREPLY` has only what follows."""
    ask = SHELLS["bash"] + (
        'COMP_LINE="$1" COMP_POINT=${#1} _meshwright; printf "%s|" "${COMPREPLY[@]}"'
    )

    def ask_bash(line):
        words = ["bash", "-c", ask, "bash", line]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr == ""
        return [word for word in done.stdout.split("|") if word]

    assert ask_bash("meshwright train layout.sp=t") == ["true "]
    assert "layout.tp=" in ask_bash("meshwright train run.toml layout.t")
    assert ask_bash("meshwright train ") == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(command):
    script = SHELLS["fish"] + 'complete --do-complete "meshwright train layout.sp=t"\n'
    done = subprocess.run(["fish", "-c", script], capture_output=True, text=True, timeout=60)
    assert "layout.sp=true" in done.stdout.split()


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(command):
    """`compadd` is a stand-in, since completion runs only while a line is edited."""
    ask = (
        "compdef() { }; compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -l -- $@ }\n"
        "_files() { }; typeset -A compstate=(nmatches 1)\n"
        + SHELLS["zsh"]
        + "words=(meshwright train layout.sp=t) CURRENT=3; _meshwright\n"
    )
    done = subprocess.run(["zsh", "-fc", ask], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["layout.sp=true"], done.stderr
