"""The configs of models that people train: each resolves, and the guide says how it is planned."""

import importlib.util
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cost.price import price
from meshwright.layout import Layout
from meshwright.planner.choices import with_compile
from meshwright.planner.plan import cost_inputs_of

ROOT = Path(__file__).parents[2]


def _printing():
    spec = importlib.util.spec_from_file_location("print_models", ROOT / "docs/print_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRINTING = _printing()
CONFIGS = PRINTING.configs()
ROWS = {
    line.split("`")[1]: line
    for line in PRINTING.PAGE.read_text(encoding="utf-8").splitlines(keepends=True)
    if line.startswith("| `")
}


def test_the_guide_has_each_config_in_order():
    assert list(ROWS) == [config.name for config in CONFIGS]
    assert len(ROWS) >= 20
    assert {config.stem.partition("-")[0] for config in CONFIGS} == set(PRINTING.KINDS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_guide_prices_a_layout_as_the_planner_does(path):
    config = mw.load_config(path)
    row = ROWS[path.name]
    layout = Layout.parse(row.split("`")[3])
    setting = with_compile(cost_inputs_of(config), compiles=True)  # as the guide's plans choose
    prediction = price(setting, layout)
    assert prediction.devices == setting.cluster.devices
    assert prediction.memory.fits
    assert PRINTING.row(path, prediction) == row, "run docs/print_models.py"
    kind = path.stem.partition("-")[0]
    assert (config.lora.rank > 0) == (kind == "lora")
    assert config.data.format == ("text" if kind == "pretrain" else "chat")
    assert f"meshwright plan examples/models/{path.name}\n" in path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_guide_has_the_best_layout(path):
    best = mw.plan(mw.load_config(path), top=1).best
    assert PRINTING.row(path, best) == ROWS[path.name], "run docs/print_models.py"
