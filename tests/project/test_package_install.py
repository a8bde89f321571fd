"""The built wheel and sdist in empty environments: they plan without torch, and train with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import TINY

pytest.importorskip("build", reason="build is not installed: python -m ci.extras package")
pytestmark = [pytest.mark.slow, pytest.mark.execs, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
# Index of torch's builds for CPUs, where pip's own serves others.
INDEX = os.environ.get("TORCH_INDEX")
KINDS = {"wheel": "*.whl", "sdist": "*.tar.gz"}
PLAN = ["plan", *TINY[:4], "model.n_kv_heads=2", "cluster.preset=h100-sxm"]


def run(*words, cwd, code=0):
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, cwd=cwd, env=environ, check=False
    )
    assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder of the sdist and the wheel made of it; MESHWRIGHT_DIST has them where they are."""
    if "MESHWRIGHT_DIST" in os.environ:
        return (ROOT / os.environ["MESHWRIGHT_DIST"]).absolute()
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


def pip(python, *words, cwd):
    run(python, "-m", "pip", "install", "--quiet", *words, cwd=cwd)


@pytest.fixture(params=KINDS)
def installed(request, dist, tmp_path):
    """An empty environment with one of them: its kind, its Python, and the file."""
    (file,) = dist.glob(KINDS[request.param])
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    pip(python, "--constraint", ROOT / "constraints.txt", file, cwd=tmp_path)
    return request.param, python, file


def test_it_plans_without_torch_and_trains_with_it(installed, corpus, tmp_path):
    kind, python, file = installed
    meshwright = python.with_name("meshwright")
    where = run(python, "-c", "import meshwright; print(meshwright.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(tmp_path / "env")
    run(python, "-c", "import torch", cwd=tmp_path, code=1)
    assert "to train the best:" in run(meshwright, *PLAN, cwd=tmp_path).stdout
    run(meshwright, *PLAN, "--html", "plan.html", cwd=tmp_path)
    run(meshwright, "predict", "--help", cwd=tmp_path)
    train = [meshwright, "train", *TINY, f"data.source={corpus}", "log.name=run"]
    refused = run(*train, cwd=tmp_path, code=2)
    assert 'pip install "meshwright[train]"' in refused.stderr
    if kind == "sdist":
        return
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = [line for line in constraints if line.startswith("torch==")]
    pip(python, *(["--index-url", INDEX] if INDEX else []), torch, cwd=tmp_path)
    pip(python, "--constraint", ROOT / "constraints.txt", f"{file}[train]", cwd=tmp_path)
    assert "done after 4 steps" in run(*train, cwd=tmp_path).stdout
    assert "page: " in run(meshwright, "report", "runs/run", cwd=tmp_path).stdout
