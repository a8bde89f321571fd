"""What a person sees: lines of a pseudo-terminal are no longer than it is wide, words are whole."""

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

from meshwright.cli import main
from meshwright.layout import Layout, resolve_layout
from meshwright.lines import GOES_ON, fitted, folded
from meshwright.planner.plan import plan, training_command
from meshwright.runtime.machines.machine import detect
from meshwright.runtime.supervise.view import LiveView, Trend
from meshwright.spec.loading import load_config
from runs import TINY, clean_environ
from test_view import START, STEP

# Escape sequences that move the cursor or colour text.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
H100 = [*TINY[:4], "model.n_kv_heads=2", "cluster.preset=h100-sxm", "train.batch=8"]
SPAN = ["data.source=text.txt", "data.cache=cache", "log.dir=runs", "log.name=run"]
COMMANDS = {
    "plan": (0, ["plan", *H100]),
    "explain": (0, ["plan", *H100, "--explain", "shard4 zero3 tp2 mb2"]),
    "refusal": (2, ["train", *TINY, "layout.tp=3", "layout.schedule=interleaved_1f1b"]),
    "prove": (0, ["prove", *TINY, "layout.pp=2", "train.batch=8"]),
    "train": (0, ["train", *TINY, *SPAN, "train.steps=8", "train.eval_every=4"]),
}


# --- folding ------------------------------------------------------------------------------------


def test_a_text_is_cut_between_words_alone():
    text = "  the layout zero-1 is /a/path/that/is/longer/than/the/width less simple\nand more"
    assert folded(text, 24).splitlines() == [
        "  the layout zero-1 is",
        "    /a/path/that/is/longer/than/the/width",
        "    less simple",
        "and more",
    ]
    assert folded("", 80) == ""
    # What is not a terminal has the text as it is: logs are searched by lines.
    assert fitted(text, io.StringIO()) == text


def test_a_folded_command_is_one_command():
    command = shlex.join(["meshwright", "train", "a file.toml", *H100, "layout.tp=8"])
    lines = folded(f"  {command}", 40, joint=GOES_ON)
    assert max(map(len, lines.splitlines())) <= 40
    assert len(lines.splitlines()) > 2
    said = subprocess.run(
        ["sh", "-c", f'meshwright() {{ printf "%s\\n" "$@"; }}\n{lines}'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.splitlines() == shlex.split(command)[1:]


# --- a pseudo-terminal --------------------------------------------------------------------------


def terminal(columns, words, folder):
    """Run a command in a terminal of so many columns; its exit code and what it printed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environ = {k: v for k, v in clean_environ().items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux's word for the end of a terminal that nobody has open any more
            break
        if not part:
            break
        said += part
    os.close(ours)
    return process.wait(timeout=120), ESCAPES.sub("", said.decode()).replace("\r\n", "\n").replace(
        "\r", "\n"
    )


def words_of(text):
    """Return the words of a text, without numbers, which differ from run to run, and charts."""
    found = re.findall(r"[A-Za-z][A-Za-z_]+", text)
    return {word for word in found if not re.fullmatch("[FB]+", word)}


@pytest.mark.parametrize("widths", [[80], pytest.param([80, 120], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.slow) if one in ("prove", "train") else one
        for one in COMMANDS
    ],
)
def test_no_line_is_longer_than_the_terminal_and_no_word_is_cut(name, widths, corpus, tmp_path):
    code, words = COMMANDS[name]
    found = {}
    for columns in widths:
        folder = tmp_path / str(columns)
        folder.mkdir()
        (folder / "text.txt").write_text(corpus.read_text())
        status, found[columns] = terminal(columns, words, folder)
        assert status == code, found[columns]
        lines = found[columns].splitlines()
        assert [line for line in lines if len(line.rstrip()) > columns] == []
    assert len(found[80].splitlines()) > 1
    # A word that is cut leaves two that the other terminal does not have.
    assert all(words_of(found[columns]) == words_of(found[80]) for columns in widths)
    if name == "train":
        assert "nats per 100 steps" in found[80]


# --- the trend of a loss ------------------------------------------------------------------------


def test_a_trend_has_its_marks_and_its_slope():
    one = Trend()
    for step in range(1, 5):
        one.add(step, 4.0 - step / 100)
    assert one.text == ""
    one.add(5, "nan")
    assert one.text == ""
    for step in range(5, 9):
        one.add(step, 4.0 - step / 100)
    assert one.text == "█▇▆▅▄▃▂▁  -1.000 nats per 100 steps"
    one.clear()
    assert one.text == ""
    flat = Trend(is_ascii=True)
    for step in range(500):
        flat.add(step, 2.0 + step % 2)  # a column has the mean of five of the last 200
    assert flat.text.split()[0] == "_@" * 20
    assert flat.text.endswith("+0.008 nats per 100 steps")


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "█"), ("latin-1", "@")])
def test_the_view_has_marks_that_its_terminal_can_show(encoding, mark):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    view = LiveView(Console(file=out, width=80, force_terminal=True))
    view.write(START)
    for step in range(1, 9):
        view.write({**STEP, "step": step, "loss": 3.0 - step / 10})
    view.close()
    out.flush()
    said = out.buffer.getvalue().decode(encoding)
    assert mark in said
    assert "-10.000 nats per 100 steps" in said


# --- the command that trains --------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [*TINY, "cluster.devices_per_node=4", "train.batch=8"],
        [*TINY, "cluster.devices_per_node=4", "layout.pp=2", "train.batch=8", "layout.auto=true"],
        [*TINY, "model.n_kv_heads=2", "cluster.devices_per_node=4", "layout.zero=1", "layout.tp=2"],
        [*TINY, "cluster.devices_per_node=1"],
        ["run file.toml", "cluster.devices_per_node=8", "layout.tp=1"],
    ],
)
def test_the_command_that_a_plan_ends_with_trains_its_best_layout(
    words, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text = "[model]\ndim = 64\nn_heads = 4\nn_kv_heads = 4\n[layout]\ntp = 2\nauto = true\n"
    (tmp_path / "run file.toml").write_text(text + '[cluster]\ndevice = "cpu"\n')
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    best = re.search(r"^best: (.*)$", said, re.MULTILINE)[1]
    command, name, *rest = shlex.split(
        said.rpartition("to train the best:\n")[2].replace("\\\n", "")
    )
    assert (command, name) == ("meshwright", "train")
    files = [word for word in rest if "=" not in word]
    config = load_config(*(files or [None]), [word for word in rest if "=" in word])
    assert not config.layout.auto
    assert resolve_layout(config, detect(config.cluster, {})).label == best


def test_a_plan_for_several_nodes_ends_with_a_job(capsys):
    words = [*H100, "data.source=stdlib", "cluster.nodes=2"]
    made = plan(load_config(None, words), 1)
    command = training_command(words, made)
    assert command.startswith("meshwright launch torchrun model.dim=32 ")
    assert main(shlex.split(command)[1:]) == 0
    config = load_config(None, [word for word in shlex.split(command) if "=" in word])
    values = config.layout.model_dump(exclude={"auto"})
    given = Layout(**{key: value for key, value in values.items() if value is not None})
    assert given == made.best.layout


def test_a_plan_of_a_run_ends_with_a_command_that_starts_another(tmp_path, capsys):
    (tmp_path / "first").mkdir()
    words = [*H100, f"log.dir={tmp_path}"]
    assert main(["plan", *words, "log.name=first"]) == 0
    assert "log.name=first-2" in capsys.readouterr().out.split()
    assert main(["plan", *words, "log.name=second"]) == 0
    assert "log.name=second-2" not in capsys.readouterr().out


def test_where_nothing_fits_there_is_no_command():
    words = [*H100, "cluster.memory=1MiB"]
    assert training_command(words, plan(load_config(None, words), 1)) is None
