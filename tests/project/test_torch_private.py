"""The private names of PyTorch: all there in each version that is allowed, and refused if not."""

import ast
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright import torch_private
from meshwright.torch_private import NAMES, TESTED, MissingInTorch, missing
from meshwright.training import step_recording

SRC = Path(torch_private.__file__).parent


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_what_torch_has(name):
    assert missing(name) is None
    module, attribute = NAMES[name]
    value = getattr(torch_private, name)
    if not attribute:
        assert value.__name__ == module
    elif isinstance(value, type):
        assert value.__name__ == attribute


def test_no_name_is_without_a_user():
    used = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "meshwright.torch_private":
                used |= {alias.name for alias in node.names}
            match node:
                case ast.Attribute(value=ast.Name(id="torch_private")):
                    used.add(node.attr)
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="torch_private"), attr="missing")
                ):
                    used |= {argument.value for argument in node.args}
    assert set(NAMES) - used == set()


def test_a_missing_name_says_which_version_has_it(monkeypatch):
    monkeypatch.setitem(NAMES, "gone", ("torch._nowhere", "Gone"))
    monkeypatch.setitem(NAMES, "moved", ("torch.utils._pytree", "tree_moved"))
    with pytest.raises(MissingInTorch, match=r"no torch\._nowhere\.Gone.*up to 2\.\d+"):
        torch_private.gone  # noqa: B018
    assert torch.__version__ in missing("tree_leaves", "moved")
    with pytest.raises(AttributeError):
        torch_private.no_name_of_ours  # noqa: B018


def test_the_newest_version_that_was_tested_is_the_newest_allowed():
    project = tomllib.loads((SRC.parents[1] / "pyproject.toml").read_text())["project"]
    bounds = next(text for text in project["optional-dependencies"]["train"] if "torch" in text)
    newest = re.search(r"<(\d+)\.(\d+)", bounds)
    assert (int(newest[1]), int(newest[2]) - 1) == TESTED
    assert tuple(map(int, torch.__version__.split(".")[:2])) <= TESTED


@pytest.mark.parametrize("reason", [None, "PyTorch 9 has no FSDPParam"])
def test_without_the_names_that_tell_memory_apart_no_memory_is_recorded(reason, monkeypatch, capfd):
    log = SimpleNamespace(trace=100, trace_memory=True)
    config = SimpleNamespace(log=log, cluster=SimpleNamespace(memory=None))
    monkeypatch.setattr(step_recording, "clock_offset", lambda world: 0.0)
    monkeypatch.setattr(step_recording, "missing", lambda *names: reason)
    recording = step_recording.Recording(
        SimpleNamespace(config=config), SimpleNamespace(rank=0), None, 0
    )
    assert recording.is_due(step_recording.MEMORY_AFTER) == (reason is None)
    assert recording.is_due(step_recording.SPANS_AFTER)
    assert ("memory is not recorded" in "".join(capfd.readouterr())) == (reason is not None)
