"""docs/guides/published.md: published layouts and the best ones, as they are priced today."""

import json
from pathlib import Path

import pytest
from benchmarks.published_trainings import BEGIN, END, PAGE, held, priced, rows, trainings

from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.price import price
from meshwright.cost.rows import read_row
from meshwright.layout import Layout

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "docs/benchmarks/published.json").read_text())
TRAININGS = {training["name"]: training for training in trainings()}
AGAIN = "run python -m benchmarks.published_trainings --out docs/benchmarks/published.json"


def test_the_page_has_ten_trainings_as_they_were_computed():
    assert [result["name"] for result in RESULTS] == list(TRAININGS)
    assert len(TRAININGS) >= 10
    assert BEGIN + rows(RESULTS) + END in PAGE.read_text(encoding="utf-8"), AGAIN


@pytest.mark.often(3)
@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result["name"])
def test_a_published_training_is_priced_as_the_page_says(result):
    training = TRAININGS[result["name"]]
    prediction, assumed = held(training)
    assert prediction.layout.world == training["row"]["n_gpus"]
    assert assumed == result["assumed"]
    _agree(priced(prediction), result["held"])
    setting = read_row(training["row"], shipped_calibration()).setting
    best = price(setting, Layout.parse(result["best"]["layout"]))
    _agree(priced(best), result["best"])
    assert best.memory.fits


def _agree(today, page):
    assert today.keys() == page.keys()
    for key, value in today.items():
        assert value == (page[key] if key == "layout" else pytest.approx(page[key])), AGAIN


def test_a_stated_utilization_and_seconds_of_a_step_agree():
    """Where a source gives seconds, the utilization follows from the model's FLOPs."""
    for result in RESULTS:
        of, stated = result["held"], result["published"]
        assert stated["mfu"] * stated["step_s"] == pytest.approx(of["mfu"] * of["step_s"])
