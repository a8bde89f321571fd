"""Meshwright from Python: names that completion finds, configs as dicts, results that print."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.prove.case import Case
from meshwright.prove.outcome import Outcome
from meshwright.prove.verdict import Verdict
from meshwright.runtime.proofs.proof import Proof

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
TINY = {"model": {"dim": 32, "n_layers": 2, "n_heads": 2}, "train.batch": 4}


def test_completion_finds_the_public_names_and_nothing_else():
    assert dir(mw) == sorted(mw.__all__)
    for name in dir(mw):
        assert getattr(mw, name) is not None


def test_completion_imports_no_torch():
    code = "import meshwright, sys; dir(meshwright); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["eval", "report", "generate", "export_hf"])
def test_a_command_that_is_no_function_says_what_is(command):
    code = f"import meshwright as mw; mw.{command}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    hint = re.search(r"use (?:mw|run)\.(\w+)\(", done.stderr)
    assert hint, done.stderr
    assert hasattr(mw, hint[1]) or hasattr(mw.Run, hint[1])


def test_the_package_that_proves_can_be_called_like_the_command(monkeypatch):
    calls = []
    monkeypatch.setattr(mw, "prove_layout", lambda *words, **more: calls.append((words, more)))
    mw.prove("config", device="cpu")
    assert calls == [(("config",), {"device": "cpu"})]
    code = "import meshwright as mw; assert callable(mw.prove); import meshwright.prove.verdict"
    code += "; assert callable(mw.prove)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_dict_is_a_config_like_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[model]\ndim = 32\nn_layers = 2\nn_heads = 2\n[train]\nbatch = 4\nsteps = 7\n")
    config = mw.load_config(TINY, {"train": {"steps": 7}})
    alike = [
        mw.load_config(file),
        mw.load_config(TINY, {"train.steps": 7}),
        mw.load_config(TINY, ["train.steps=7"]),
    ]
    assert all(other.model_dump() == config.model_dump() for other in alike)
    assert config.origins["train.steps"] == "override"
    assert config.origins["model.dim"] == "config"


def test_a_dict_takes_aliases_and_paths(tmp_path):
    config = mw.load_config({"batch_size": 2, "data": {"source": tmp_path, "weights": None}})
    assert (config.train.batch, config.data.source) == (2, str(tmp_path))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"modle": {"dim": 32}}, r"unknown section \[modle\] \(config\); nearest legal: \[model\]"),
        ({"model": {"dmi": 32}}, r"unknown key model.dmi \(config\); nearest legal: model.dim"),
        ({"model.dmi": 32}, r"unknown key model.dmi \(config\); nearest legal: model.dim"),
        ({"model": {"dim": "wide"}}, r"model.dim = 'wide' \(config\) must be an integer"),
        ({"model": 32}, r"unknown name model \(config\)"),
    ],
)
def test_a_dict_is_checked_like_a_file(values, told):
    with pytest.raises(ConfigError, match=told):
        mw.load_config(values)


def test_overrides_as_one_text_are_refused():
    with pytest.raises(ConfigError, match="must be a list of texts, or a dict"):
        mw.load_config(None, "train.steps=7")


def test_a_config_prints_what_is_not_the_default():
    text = str(mw.load_config(TINY))
    assert text == repr(mw.load_config(TINY))
    assert "model.dim=32" in text
    assert "train.batch=4" in text
    assert "checkpoint" not in text


def test_a_plan_prints_as_a_short_table():
    plan = mw.plan(mw.load_config(TINY))
    text = str(plan)
    assert len(text) < 2000
    assert text == repr(plan)
    for layout in plan.found.ranked:
        assert any(line.startswith(f"{layout.layout.label} ") for line in text.splitlines())
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + len(plan.found.ranked)
    assert all(f"<td>{one.layout.label}</td>" in html for one in plan.found.ranked)


def test_a_plan_in_which_nothing_fits_says_so():
    plan = mw.plan(mw.load_config(TINY), margin=0.999999)
    assert plan.best is None
    assert "no layout fits" in str(plan)
    assert "no layout fits" in plan._repr_html_()


def test_a_proof_prints_its_verdicts_and_escapes_them():
    config = mw.load_config(TINY)
    case = Case(config.model, config.train, Layout())
    good = Verdict("loss", {}, 1.0, 1e-9, 1e-6, passed=True)
    bad = Verdict("<b>updates</b>", {}, 1.0, 2.0, 1e-6, passed=False)
    proof = Proof(Layout(), (Outcome(case, (good, bad), 1.0),), ("train.batch",), ())
    assert not proof.passed
    assert proof.verdicts == (good, bad)
    assert "NOT proven" in str(proof)
    assert "FAIL" in str(proof)
    html = proof._repr_html_()
    assert "&lt;b&gt;updates" in html
    assert "<b>" not in html
    assert html.count("<tr>") == 3
    assert Proof(Layout(), (Outcome(case, (good,), 1.0),), (), ()).passed
    assert not Proof(Layout(), (), (), ()).passed


def test_what_is_no_run_is_not_opened(tmp_path):
    with pytest.raises(ConfigError, match="is not a run folder"):
        mw.open_run(tmp_path)


@pytest.mark.slow
def test_the_example_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names = {}
    for number, cell in enumerate(cells):
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    run, plan, proof = names["run"], names["plan"], names["proof"]
    assert run.exit_code == 0
    assert names["losses"][-1] < names["losses"][0]
    assert names["exported"].passed
    assert proof.passed
    assert plan.best.memory.fits
    assert mw.open_run("runs/latest").exit_code is None
    assert "Done: 20 steps." in str(run)
    assert "Final loss" in run._repr_html_()
    assert (tmp_path / "runs/latest/report/index.html").is_file()
