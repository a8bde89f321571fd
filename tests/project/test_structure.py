"""The shape of the house: import direction, torch-free rooms, file and function sizes."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.units import MIB

SRC = Path(__file__).parents[2] / "src" / "meshwright"
# Each room may import itself and those before it.
ORDER = [
    "version",
    "units",
    "errors",
    "parsing",
    "lines",
    "tables",
    "store",
    "files",
    "spec",
    "layout",
    "interop",
    "program",
    "cost",
    "torch_private",
    "models",
    "data",
    "planner",
    "report",
    "comm",
    "kernels",
    "parallel",
    "checkpoint",
    "training",
    "evaluate",
    "simulate",
    "prove",
    "bench",
    "runtime",
    "serve",
    "cli",
]
# Each package of a room may import itself and those before it; the files beside them all of them.
PACKAGES = {
    "parallel": [
        *("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel"),
        "user_models",
    ],
    "runtime": [
        *("machines", "supervise", "pricing", "checks", "ranks", "measure", "proofs", "jobs"),
        *("peers", "startup"),
    ],
}
TORCH_FREE_ROOMS = [
    *("spec", "layout", "interop", "program", "cost", "planner", "report", "serve", "data"),
]


def modules():
    return sorted(SRC.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


class Module(NamedTuple):
    """What a module imports, by name and line; functions by name, line and length; its classes.

    The trees of all modules, if they were kept, would hold up every collection of garbage.
    """

    imports: list[tuple[str, int]]
    functions: list[tuple[str, int, int]]
    classes: list[str]


@functools.cache
def parsed(path: Path) -> Module:
    tree = ast.parse(path.read_text())
    found = Module([], [], [node.name for node in tree.body if isinstance(node, ast.ClassDef)])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imports.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            is_all = node.module == "meshwright"
            names = [f"{node.module}.{a.name}" if is_all else node.module for a in node.names]
            found.imports.extend((name, node.lineno) for name in names)
        elif isinstance(node, ast.FunctionDef):
            found.functions.append((node.name, node.lineno, node.end_lineno - node.lineno))
    return found


def imported_rooms(path: Path):
    for name, line in parsed(path).imports:
        if name.startswith("meshwright."):
            yield name.split(".")[1], line


def test_imports_go_one_way():
    for path in modules():
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        allowed = ORDER[: ORDER.index(room) + 1]
        for imported, line in imported_rooms(path):
            assert imported in allowed, f"{path}:{line}: {room} must not import {imported}"


@pytest.mark.parametrize("room", PACKAGES)
def test_imports_between_the_packages_of_a_room_go_one_way(room):
    order = PACKAGES[room]
    assert {p.name for p in (SRC / room).iterdir() if (p / "__init__.py").is_file()} == set(order)
    imported = re.compile(rf"(?:from|import) meshwright\.{room}\.(\w+)")
    for number, package in enumerate(order):
        for path in sorted((SRC / room / package).glob("*.py")):
            for name in imported.findall(path.read_text()):
                assert name in order[: number + 1], f"{path}: {package} must not import {name}"


# Shims for other systems' code, run in place of ours, which give torch what that code asks of it.
SHIMS = "runtime/peers"


def dotted_name(node):
    """The names that an attribute is reached by; "" for an attribute of a call's result."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def private_names_of_torch(path):
    """Yield what a file uses of torch's private API; `torch.ops` holds operators by name."""

    def is_private(dotted):
        return any(re.match("_[^_]", part) for part in dotted.split("."))

    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted_name(node)]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch[\w.]*", str(node.value)):
            names = [str(node.value)]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            is_of_torch = root in ("torch", "dist") and not rest.startswith("ops.")
            if is_of_torch and is_private(rest):
                yield f"{path.relative_to(SRC)}:{node.lineno}: {name}"
        if "unittest.mock" in names or "unittest" in [name.partition(".")[0] for name in names]:
            yield f"{path.relative_to(SRC)}:{node.lineno}: unittest"


def test_private_names_of_torch_stand_in_one_module():
    modules_of_ours = [
        path
        for path in modules()
        if room_of(path) != "torch_private" and SHIMS not in str(path.relative_to(SRC))
    ]
    assert [line for path in modules_of_ours for line in private_names_of_torch(path)] == []
    assert list(private_names_of_torch(SRC / "torch_private.py"))  # what the test can see


def test_every_room_is_in_the_order():
    rooms = {room_of(p) for p in modules()} - {"__init__", "__main__"}
    assert rooms == set(ORDER)


def test_torch_free_rooms_do_not_load_torch():
    names = [
        "meshwright." + ".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        for p in modules()
        if room_of(p) in TORCH_FREE_ROOMS
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_supervisor_and_config_command_do_not_load_torch():
    code = (
        "import sys, meshwright.runtime.session, meshwright.cli.config, meshwright.cli.train\n"
        "import meshwright.cli.plan, meshwright.cli.predict\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_plan_loads_no_numpy():
    """Loading it takes a tenth of the time of a command that needs no array."""
    code = (
        "import sys\n"
        "from meshwright.cli.main import main\n"
        "main(['plan', 'model.preset=llama-3-8b', 'cluster.preset=h100-sxm'])\n"
        "print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_no_large_or_built_file_is_kept():
    """A wheel that somebody downloaded into the checkout was committed once."""
    root = SRC.parents[1]
    if not (root / ".git").exists():
        pytest.skip("this is not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    kept = [root / name for name in listed.stdout.decode().split("\0") if name]
    for path in kept:
        assert path.suffix not in {".whl", ".gz", ".so", ".pyc", ".safetensors"}, path
        assert not path.is_file() or path.stat().st_size < 2 * MIB, path


def test_no_two_files_of_tests_share_a_name():
    """Pytest imports each by its name alone, and refuses the second."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_files_and_functions_stay_small():
    for path in modules():
        assert path.read_text().count("\n") <= 800, path
        for name, line, length in parsed(path).functions:
            assert length < 60, f"{path}:{line} {name}"


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "ci"])
def test_files_beside_the_package_stay_small_too(folder):
    for path in sorted((SRC.parents[1] / folder).rglob("*.py")):
        assert path.read_text().count("\n") <= 800, path


def test_environment_is_read_only_at_the_doors():
    for path in modules():
        if room_of(path) not in ("cli", "runtime", "comm"):
            text = path.read_text()
            assert "os.environ" not in text, path
            assert "getenv" not in text, path


def test_no_two_public_classes_share_a_name():
    places = {}
    for path in modules():
        for name in parsed(path).classes:
            if not name.startswith("_"):
                places.setdefault(name, []).append(str(path.relative_to(SRC)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_modules_that_a_docstring_or_comment_names_exist():
    # Sections of a config have some of the names, too, and `spec` is a common parameter.
    rooms = {room_of(module) for module in modules() if module.parent != SRC}
    rooms -= {"checkpoint", "data", "layout", "spec"}
    for path in modules():
        for name in re.findall(r"`(\w+(?:\.\w+)+)`", path.read_text()):
            room, *rest = name.split(".")
            if room in rooms and rest[-1] not in {"py", "md", "toml"}:
                assert _stands_in(SRC / room, rest), f"{path}: {name}"


def _stands_in(folder: Path, names: list[str]) -> bool:
    """Tell whether a dotted name below a package is a module of it, or a name in that module."""
    while names and (folder / names[0]).is_dir():
        folder, names = folder / names[0], names[1:]
    if not names:
        return True
    module = folder / f"{names[0]}.py"
    return module.exists() and all(
        re.search(rf"\b{name}\b", module.read_text()) for name in names[1:]
    )


def test_what_a_device_does_differently_stands_in_one_table():
    """A test of the device in a formula is a second description of it, which drifts."""
    asks = re.compile(r"\bon_cpu\b|\bsums_in_place\b|target\.device\b")
    for path in modules():
        if path != SRC / "program" / "target.py":
            assert not (named := asks.findall(path.read_text())), f"{path}: {named}"
