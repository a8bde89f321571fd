"""The shape of the house: import direction, torch-free rooms, file and function sizes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "meshwright"
# Each room may import itself and those before it.
ORDER = [
    "version",
    "units",
    "errors",
    "spec",
    "layout",
    "interop",
    "program",
    "predict",
    "models",
    "data",
    "search",
    "report",
    "execute",
    "checkpoint",
    "train",
    "evaluate",
    "simulate",
    "prove",
    "bench",
    "launch",
    "cli",
]
TORCH_FREE_ROOMS = ["spec", "layout", "interop", "program", "predict", "search", "report", "data"]


def modules():
    return sorted(SRC.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_rooms(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [
                f"{node.module}.{a.name}" if node.module == "meshwright" else node.module
                for a in node.names
            ]
        for name in names:
            if name.startswith("meshwright."):
                yield name.split(".")[1], node.lineno


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_one_way(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    allowed = ORDER[: ORDER.index(room) + 1]
    for imported, line in imported_rooms(path):
        assert imported in allowed, f"{path}:{line}: {room} must not import {imported}"


def test_every_room_is_in_the_order():
    rooms = {room_of(p) for p in modules()} - {"__init__", "__main__"}
    assert rooms == set(ORDER)


@pytest.mark.parametrize("room", TORCH_FREE_ROOMS)
def test_torch_free_rooms_do_not_load_torch(room):
    names = [
        "meshwright." + ".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        for p in modules()
        if room_of(p) == room
    ]
    code = (
        "import sys\n" + "\n".join(f"import {n}" for n in names) + "\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_supervisor_and_config_command_do_not_load_torch():
    code = (
        "import sys, meshwright.launch.session, meshwright.cli.config, meshwright.cli.train\n"
        "import meshwright.cli.plan, meshwright.cli.predict\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_files_and_functions_stay_small(path):
    source = path.read_text()
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 66, f"{path}:{node.lineno} {node.name}"


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_files_beside_the_package_stay_small_too(folder):
    for path in sorted((SRC.parents[1] / folder).rglob("*.py")):
        assert path.read_text().count("\n") <= 400, path


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_environment_is_read_only_at_the_doors(path):
    if room_of(path) in ("cli", "launch", "execute"):
        return
    text = path.read_text()
    assert "os.environ" not in text
    assert "getenv" not in text
