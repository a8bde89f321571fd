"""What a run is predicted to take where its ranks share the machine's cores."""

from pathlib import Path

import pytest

from meshwright.layout import Machine, resolve_layout
from meshwright.runtime.pricing.planned import predicted
from meshwright.spec.loading import load_config
from meshwright.training.run_folder import Job, RunFolder, RunTokenizer


def step_time(ranks, cores):
    config = load_config(None, [f"layout.dp_replicate={ranks}", "train.batch=8", "model.dim=512"])
    machine = Machine("cpu", min(2, cores), cores, "CPU", is_fixed=False)
    layout = resolve_layout(config, machine)
    folder = RunFolder(Path("unused"))
    tokenizer = RunTokenizer("bytes", None, None)
    return predicted(Job(config, layout, machine, Path("cache"), folder, tokenizer)).step_time_s


def test_ranks_that_share_cores_are_as_much_slower():
    two, four, eight = (step_time(ranks, 2) for ranks in (2, 4, 8))
    # Half of the rows each at half of the speed; what is left is messages among more ranks.
    assert four == pytest.approx(two, rel=0.2)
    assert eight == pytest.approx(two, rel=0.3)


def test_a_rank_that_has_all_cores_is_faster():
    assert step_time(1, 2) == pytest.approx(step_time(2, 2), rel=0.2)
    assert step_time(2, 1) == pytest.approx(2 * step_time(2, 2), rel=0.1)
