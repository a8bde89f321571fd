"""The package: one version everywhere, planning without torch, a workflow that releases it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from ci.release import ROOT, absolute, expected, newest, problems, summary, version
from packaging.specifiers import SpecifierSet

from meshwright.errors import EXIT_REFUSED
from meshwright.runtime.pricing import measured
from meshwright.runtime.pricing.measured import VARIABLE
from meshwright.version import __version__
from runs import TINY

# Has Python know nothing of what the extra `train` brings.
HIDES = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
import importlib.metadata
known = importlib.metadata.Distribution.from_name
def from_name(name):
    if name in ("torch", "safetensors"):
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.Distribution.from_name = from_name
from meshwright.runtime.machines import machine
machine.torch_build = lambda file=None: None
from meshwright.cli import main
sys.exit(main(sys.argv[1:]))
"""
# The same for several commands, one after the other: a line of JSON for each.
EACH = HIDES.replace(
    "sys.exit(main(sys.argv[1:]))",
    """
import contextlib, io, json
for words in json.loads(sys.argv[1]):
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, told.getvalue()]))
""",
)
H100 = [*TINY[:4], "model.n_kv_heads=2", "cluster.preset=h100-sxm"]


def without_torch(commands, cwd, environ=None):
    """Return the exit code of each command, and what it said of errors."""
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=True,
        env=environ,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_planning_needs_no_torch(tmp_path):
    commands = [
        ("plan", *H100, "--json"),
        ("config", "show"),
        ("predict", "--help"),
        ("launch", "torchrun", *H100, "data.source=stdlib", "cluster.nodes=2"),
    ]
    found = without_torch(commands, tmp_path)
    assert [code for code, _ in found] == [0] * len(commands), found


def test_a_plan_of_this_machine_needs_no_torch_and_says_what_it_rests_on(tmp_path):
    here = ("plan", *TINY, "--top", "1")
    commands = [here, (*here, "--html", "plan.html"), (*here, "--explain", "dp2 mb1"), here]
    cache = tmp_path / "cache"
    (cache / "meshwright" / measured._FOLDER).mkdir(
        parents=True
    )  # as another environment has left it
    environ = {key: value for key, value in os.environ.items() if key != VARIABLE}
    for code, said in without_torch(commands, tmp_path, {**environ, "XDG_CACHE_HOME": str(cache)}):
        assert code == 0, said
        assert said.count("note:") == 1
        assert "this CPU is not measured, which needs PyTorch" in said
        assert "shipped constants" in said


@pytest.mark.slow
def test_what_computes_says_in_one_sentence_what_to_install(tmp_path):
    commands = [
        ("train", *TINY),
        ("prove", *TINY, "layout.pp=2"),
        ("simulate", "layout.tp=2"),
        ("bench", "device"),
        ("generate", "runs/latest"),
        ("eval", "runs/latest"),
    ]
    for words, (code, said) in zip(commands, without_torch(commands, tmp_path), strict=True):
        assert code == EXIT_REFUSED, said
        (line,) = said.splitlines()
        assert line.startswith(f"meshwright {words[0]}: ")
        assert line.endswith(
            'needs PyTorch, which is not installed: pip install "meshwright[train]"'
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_another_package_that_is_missing_is_no_matter_of_the_extra(tmp_path):
    code = HIDES.replace('("torch", "safetensors")', '("yaml",)')
    words = [sys.executable, "-c", code, "launch", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "ModuleNotFoundError: No module named 'yaml'" in done.stderr


def test_the_version_is_that_of_the_newest_heading():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert __version__ == expected(newest(changelog))
    assert version((ROOT / "src/meshwright/version.py").read_text()) == __version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]


def test_a_tag_is_released_only_as_the_version_that_it_names():
    text = "# Changelog\n\n## [0.3.0] - {}\n\nA summary.\n\n### Added\n"
    of = {day: text.format(day) for day in ("unreleased", "2026-01-02")}
    ours = '__version__ = "0.3.0"\n'
    assert problems("v0.3.0", of["2026-01-02"], ours) == []
    assert problems("v0.3.1", of["2026-01-02"], ours) == ["the tag is v0.3.1, the version 0.3.0"]
    assert len(problems("v0.3.0", of["unreleased"], ours)) == 2
    assert len(problems("v0.3.0", of["2026-01-02"], ours.replace("3.0", "2.9"))) == 2


def test_a_release_has_a_summary_that_is_read_in_two_minutes():
    text = summary((ROOT / "CHANGELOG.md").read_text())
    assert 50 < len(text.split()) < 400  # 200 words a minute
    bare = "# Changelog\n\n## [0.3.0] - 2026-01-02\n\n### Added\n\n- This.\n"
    ours = '__version__ = "0.3.0"\n'
    assert problems("v0.3.0", bare, ours) == ["CHANGELOG.md: [0.3.0] has no summary"]


def test_links_of_the_readme_hold_on_a_package_index():
    text = absolute((ROOT / "README.md").read_text(), "https://host/us/it/", "v0.3.0")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 20
    ours = "https://host/us/it/"
    for target in targets:
        assert target.startswith(("https://", "#")), target
        if target.startswith(ours):
            kind, tag, path = target.removeprefix(ours).split("/", 2)
            assert tag == "v0.3.0"
            assert (ROOT / path.partition("#")[0]).exists(), path
            assert (kind == "raw") == path.endswith((".png", ".svg")), target
    assert absolute(text, "https://other/one", "v1") == text


def test_what_trains_is_an_extra_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not any(one.startswith(("torch", "safetensors")) for one in project["dependencies"])
    assert [one.partition(">")[0] for one in extras["train"]] == ["torch", "safetensors"]
    for name in ("dev", "fp8", "deepspeed", "lm-eval", "ray"):
        assert any(one.startswith("meshwright[train") for one in extras[name]), name
    assert "Typing :: Typed" in project["classifiers"]
    assert (ROOT / "src/meshwright/py.typed").is_file()
    table = (ROOT / "docs/install.md").read_text()
    assert all(f"`{name}`" in table for name in extras)


def test_a_release_builds_checks_and_publishes_without_a_token():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    run = [step.get("run", "") for step in jobs["build"]["steps"]]
    for command in ("ci.release", "-m build", "twine check --strict", "ci.extras package"):
        assert any(command in one for one in run), command
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in text


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=str)
def test_an_issue_template_asks_for_something(path: Path):
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        return
    assert {"name", "description", "body"} <= set(form)
    assert any(one.get("validations", {}).get("required") for one in form["body"])


def test_pinned_packages_install_on_the_oldest_python():
    """Debian 12 has Python 3.11.2, which a package that asks for 3.11.5 does not support."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = f"{project['requires-python'].removeprefix('>=')}.0"
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()]
    for name, pinned in (pin for pin in pins if len(pin) == 2):
        try:
            package = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        if package["Version"] == pinned:
            assert SpecifierSet(package["Requires-Python"] or "").contains(oldest), name
