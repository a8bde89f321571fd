"""Measured figures on pages: each says when and by which command, and old ones can be listed."""

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.figures import ROOT, changes_since, read_table

FIGURES = read_table()
MEASUREMENTS = "docs/benchmarks/README.md"
# Of it: the page has figures of another, which has its own entry or is written by a command.
ELSEWHERE = {"Imports of other systems' configs"}


def section_of(figure):
    """Return the text that has a figure: a section of its page, or the page."""
    text = (ROOT / figure.page).read_text(encoding="utf-8")
    if figure.section is None:
        return text
    sections = dict(part.partition("\n")[::2] for part in re.split(r"^## ", text, flags=re.M)[1:])
    return sections[figure.section]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.page}-{figure.section}")
def test_a_figure_says_when_and_how_it_was_measured(figure):
    text = section_of(figure)
    assert str(figure.date) in text
    assert figure.paths
    for path in figure.paths:
        assert (ROOT / path).exists(), path
    module = re.match(r"python -m (benchmarks\.\w+)", figure.command)
    if module:
        assert module[0] in text
        assert importlib.util.find_spec(module[1]) is not None
    else:
        assert re.match(r"meshwright \w+|python -m pytest|make \w+", figure.command)[0] in text


def test_each_section_of_measurements_is_in_the_table():
    text = (ROOT / MEASUREMENTS).read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (.+)$", text, re.M))
    listed = {figure.section for figure in FIGURES if figure.page == MEASUREMENTS}
    assert listed == sections - ELSEWHERE
    pages = {figure.page for figure in FIGURES}
    assert {"README.md", "docs/parallelism.md", MEASUREMENTS} <= pages


def is_whole_checkout():
    words = ["git", "rev-parse", "--is-shallow-repository"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() == "false"


@pytest.mark.skipif(not is_whole_checkout(), reason="the history is not there")
def test_each_commit_is_in_the_history():
    for figure in FIGURES:
        assert changes_since(figure) >= 0


def test_a_figure_is_old_when_its_code_has_changed(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(name):
        (Path(tmp_path) / name).parent.mkdir(exist_ok=True)
        (Path(tmp_path) / name).open("a").write("x\n")
        git("add", "-A")
        git("commit", "-q", "-m", "a change")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    measured = commit("code/a.py")
    figure = replace(FIGURES[0], commit=measured, paths=("code",))
    assert changes_since(figure, tmp_path) == 0
    commit("other/b.py")
    assert changes_since(figure, tmp_path) == 0
    commit("code/a.py")
    commit("code/c.py")
    assert changes_since(figure, tmp_path) == 2
