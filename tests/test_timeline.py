"""Timelines of memory: against what the profiler sees of real steps, and against themselves."""

import pytest

from meshwright.bench.memory import measure
from meshwright.layout import Layout
from meshwright.predict.timeline import timeline
from meshwright.program.lower import lower
from meshwright.program.shards import sums_in_place
from meshwright.prove.case import Case
from meshwright.prove.matrix import matrix
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks

MODEL = model_spec(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=512)
TRAIN = TrainSpec(batch=8, seq_len=128)
LASTING = {"weights", "gradients", "optimizer", "rotary tables", "communication buffers"}


def peaks(world, label, precision, model=MODEL):
    case = Case(model, TRAIN.model_copy(update={"precision": precision}), Layout.parse(label))
    return measure(world, case).peak.total


@pytest.mark.parametrize(
    ("label", "precision", "bound"),
    [
        ("dp2 mb4", "fp32", 0.015),  # gloo may be done with its copy of the head's gradient
        ("pp2 gpipe mb2 recompute-full", "fp32", 0.01),
        ("pp2 1f1b mb1 recompute-selective", "fp32", 0.01),
        # The gradient that waits with the MLP's last product is the stream's own: counted twice.
        ("pp2 zbv v2 mb2", "fp32", 0.015),
        # A thread of gloo may be the last to let go of what it sends, which the profiler misses.
        ("dp2 mb2", "bf16", 0.08),
        ("shard2 zero1 mb2", "fp32", 0.08),
        ("shard2 zero1 mb2", "bf16", 0.08),
        ("shard2 zero2 mb2", "fp32", 0.08),
        ("shard2 zero3 mb2", "bf16", 0.08),
        ("tp2 sp mb2", "fp32", 0.08),
        ("cp2-ring mb2", "fp32", 0.08),
    ],
)
def test_the_peak_is_what_the_profiler_sees(label, precision, bound):
    train = TRAIN.model_copy(update={"precision": precision})
    program = lower(MODEL, train, Layout.parse(label))
    found = on_ranks(2, peaks, label=label, precision=precision)
    for rank, measured in enumerate(found):
        assert timeline(program, rank).peak.total == pytest.approx(measured, rel=bound)


@pytest.mark.parametrize(
    ("label", "precision", "tied"),
    [
        ("dp2 mb4", "bf16", True),
        ("tp2 sp mb8", "fp32", False),
        ("pp2 zbv v2 mb4", "fp32", True),
        ("shard2 zero3 mb4", "fp32", False),
    ],
)
def test_the_peak_where_logits_are_made_in_rounds(label, precision, tied):
    layers = 4 if "v2" in label else 2
    sizes = {"vocab_size": 8192, "n_layers": layers, "tie_embeddings": tied}
    model = MODEL.model_copy(update=sizes)
    train = TRAIN.model_copy(update={"precision": precision})
    program = lower(model, train, Layout.parse(label))
    found = on_ranks(2, peaks, label=label, precision=precision, model=model)
    for rank, measured in enumerate(found):
        assert timeline(program, rank).peak.total == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_what_a_step_takes_it_gives_back(world):
    for case in matrix(world):
        if case.refused is not None:
            continue
        program = lower(case.model, case.train, case.layout)
        for rank in {0, world - 1}:
            found = timeline(program, rank, packed=case.packed)
            start, end = found.moments[0].held, found.moments[-1].held
            # Whole weights of one's own are not gathered, but have a copy in half precision.
            has_copy = sums_in_place(case.layout, on_cpu=True) and case.train.precision != "fp32"
            has_copy = has_copy and (case.layout.zero < 3 or case.layout.shard_ranks == 1)
            assert set(end) <= LASTING | ({"gathered"} if has_copy else set()), (case.label, end)
            for lasts in ("weights", "optimizer", *(["gathered"] if has_copy else [])):
                assert start.get(lasts) == end.get(lasts), case.label


def test_a_microbatch_more_in_flight_costs_its_activations():
    def peak(schedule, rank):
        layout = Layout.parse(f"pp2 {schedule} mb1")
        return timeline(lower(MODEL, TRAIN, layout), rank).peak.total

    assert peak("gpipe", 0) > peak("1f1b", 0) > peak("naive", 0)


def test_the_peak_says_where_it_is():
    layout = Layout.parse("dp2 mb4")
    wide = MODEL.model_copy(update={"vocab_size": 8192})
    peak = timeline(lower(wide, TRAIN, layout), 0).peak
    assert (peak.action, peak.what) == ("B 0 0", "loss")
    assert peak.held["logits and loss"] == 4 * 256 * 8192  # half of a microbatch's
