"""No pickle is read or written: the source has no call that does, and no import that could."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "meshwright"
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# Of torch and of numpy; a `load` of safetensors, JSON, TOML or of ours has another owner.
CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "torch.serialization.load"}
# Of torch.distributed: objects are sent as pickles, and distributed checkpoints have one.
OF_DISTRIBUTED = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "rpc_sync", "rpc_async"),
    *("FileSystemReader", "FileSystemWriter"),
}


def pickling(text):
    """Return what a source has that reads or writes pickles, as (line, text) pairs."""
    hits = []
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node), node.attr if node.attr in OF_DISTRIBUTED else ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Scripts that the program writes, and names that are looked up
            names = [name for name in OF_DISTRIBUTED if f"{name}(" in node.value]
            names += [node.value] if node.value in MODULES | OF_DISTRIBUTED else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            names = ["pickle"]
        hits += [
            (node.lineno, name)
            for name in names
            if name.split(".")[0] in MODULES or name in CALLS | OF_DISTRIBUTED
        ]
    return hits


def test_the_source_has_no_pickles():
    assert [
        (str(path.relative_to(SRC)), *hit)
        for path in sorted(SRC.rglob("*.py"))
        for hit in pickling(path.read_text())
    ] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import cloudpickle as quick",
        "import torch\ntorch.load(path, weights_only=True)",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object(values, value)",
        "from torch.distributed import broadcast_object_list",
        "SCRIPT = '''\ndist.gather_object(x)\n'''",
        "__import__('marshal')",
        "numpy.load(path)",
        "numpy.lib.format.read_array(file, allow_pickle=True)",
    ],
)
def test_the_search_sees_pickles(text):
    assert pickling(text)


def test_the_search_accepts_other_loads():
    text = "import json\njson.load(file)\nsafetensors.torch.load(data)\nmodel.load(path)"
    assert pickling(text) == []
