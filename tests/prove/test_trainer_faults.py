"""The core of comparison names faults of made-up runs, and accuses no healthy one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.prove.trainers.judge import judge
from meshwright.prove.trainers.observed import MeshAxis, axes_and_products, joined
from synthetic_runs import FAULTS, NAMES, MadeUpRun, drawn


def judged(run, **options):
    return judge([run.observed()], [run.replayed()], run.axes, NAMES, **options)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_healthy_run_is_accused(seed):
    run, _ = drawn(seed)
    verdict = judged(run)
    assert verdict.passed, verdict.faults
    assert verdict.compared > 2 * len(NAMES)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(FAULTS)))
def test_a_fault_of_any_kind_is_named(seed, name):
    run, kind = drawn(seed, name)
    verdict = judged(run, convention="mean")
    assert not verdict.passed
    kinds = [fault.kind for fault in verdict.faults]
    assert kinds[0] == kind, (name, run.dp, run.tp, run.microbatches, verdict.faults)


def test_a_sum_over_tp_that_is_missing_names_axis_and_parameters():
    run = MadeUpRun(1, 2, 2, 2)
    FAULTS["tp_sum_missing"][2](run)
    (fault,) = judged(run).faults
    assert (fault.kind, fault.axes, fault.ranks) == ("missing sum", ("tp",), (0, 1, 2, 3))
    assert fault.tensors[0] == "norm.weight"
    assert "a sum over tp is missing" in fault.sentence


def test_a_power_series_over_microbatches_is_written_out():
    run = MadeUpRun(2, 1, 2, 2)
    FAULTS["tp_summed_again"][2](run)
    (fault,) = judged(run).faults
    assert fault.axes == ("tp",)
    assert "again at each microbatch: 2 g0 + g1" in fault.sentence


def test_a_ratio_is_named_by_the_axes_whose_sizes_it_is():
    run = MadeUpRun(3, 2, 3, 1)
    run.set(["head.weight"], lambda name, rank: 6 * run.exact(name))
    (fault,) = judged(run).faults
    assert (fault.kind, fault.axes) == ("scaled", ("dp x tp",))
    assert fault.ratio == pytest.approx(6, rel=1e-5)


def test_the_convention_is_found():
    run = MadeUpRun(4, 3, 1, 2)
    assert judged(run).convention == "mean"
    run.set(NAMES, lambda name, rank: 3 * run.exact(name))
    run.updates, run.norms = {n: {0: -0.3 * run.exact(n)} for n in NAMES}, {}
    replayed = run.replayed()._replace(updates=None)
    verdict = judge([run.observed()], [replayed], run.axes, NAMES)
    assert (verdict.convention, verdict.passed) == ("sum", True)


def test_what_is_upstream_of_a_fault_follows_from_it():
    """A router's gradient is partial, and so is what flows on to the layers before it."""
    run = MadeUpRun(5, 1, 2, 1)
    gate = NAMES.index("layers.1.mlp.gate")
    run.set(NAMES[:gate], lambda name, rank: run.exact(name) + 0.3 * run.normal(name))
    run.set(NAMES[gate : gate + 1], lambda name, rank: run.parts[0, 0, rank][name])
    (fault,) = judged(run).faults
    assert (fault.kind, fault.tensors) == ("missing sum", ("layers.1.mlp.gate",))
    assert fault.follows == gate
    assert f"{gate} more upstream follow" in fault.sentence


def test_dead_models_are_refused():
    run = MadeUpRun(6, 2, 1, 2)
    for parts in run.parts.values():
        for name in NAMES:
            parts[name].zero_()
    run.set(NAMES, lambda name, rank: torch.zeros(run.shapes[name]))
    verdict = judged(run)
    assert not verdict.passed
    assert "zero" in verdict.refused
    flat = MadeUpRun(6, 2, 1, 2)
    flat.loss_values = dict.fromkeys(flat.loss_values, 3.0)
    replayed = flat.replayed()._replace(losses=[(3.0, 1e-6)] * 4)
    verdict = judge([flat.observed()], [replayed], flat.axes, NAMES)
    assert "nothing depends on the data" in verdict.refused


def test_nan_in_the_second_step_says_so():
    first, second = MadeUpRun(7, 2, 1, 1), MadeUpRun(7, 2, 1, 1)
    second.set(NAMES[3:4], lambda name, rank: torch.full(second.shapes[name], torch.nan))
    steps = [first, second]
    observed, replayed = [run.observed() for run in steps], [run.replayed() for run in steps]
    (fault,) = judge(observed, replayed, first.axes, NAMES).faults
    assert (fault.step, fault.kind, fault.tensors) == (2, "not finite", (NAMES[3],))


def test_axes_are_joined_to_what_they_connect():
    dp, tp = MeshAxis("dp", ((0, 2), (1, 3))), MeshAxis("tp", ((0, 1), (2, 3)))
    assert joined([dp, tp]).groups == ((0, 1, 2, 3),)
    one = MeshAxis("pp", ((0,), (1,), (2,), (3,)))
    assert [axis.name for axis in axes_and_products([dp, one, tp])] == ["dp", "tp", "dp x tp"]
