"""The benchmark of predicted memory: models of the table, scaled to a size."""

from dataclasses import replace

import pytest
from benchmarks.predicted_memory import WIDER, WIDTHS, Choice, scaled

from meshwright.bench.memory_breakdown import measure
from meshwright.cost.timeline import timeline
from meshwright.layout import Layout
from meshwright.program.lower import lower
from meshwright.program.target import Processor, Target, route
from meshwright.prove.matrix import matrix
from ranks import on_ranks


def test_every_width_of_a_model_is_scaled():
    for case in (one for one in matrix(2) if one.refused is None):
        found = scaled(case, "torch")
        for name in WIDTHS:
            width = getattr(case.model, name)
            assert getattr(found.model, name) == (width and WIDER * width)
    assert len(Choice(2, 3, "torch").cases) > 40


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_scaled_model_is_measured_and_predicted(family):
    (case, *_) = Choice(2, 1, "torch", (family,)).cases
    layout = Layout(microbatch=case.layout.microbatch, recompute=case.layout.recompute)
    case = replace(case, layout=layout, train=case.train.model_copy(update={"batch": 4}))
    (measured,) = on_ranks(1, measure, case=case)
    target = Target("cpu", route(case.train.matmul, Processor()), case.packed)
    predicted = timeline(lower(case.model, case.train, case.optimizer, case.layout, target), 0).peak
    assert measured.peak.total == pytest.approx(predicted.total, rel=0.1)


def of_table(family, word, label):
    """The first case of a family whose label has a word, scaled, on another layout."""
    legal = (one for one in matrix(2) if one.refused is None)
    case = next(one for one in legal if one.model.family == family and word in one.label)
    case = scaled(case, "torch")
    train = case.train.model_copy(update={"batch": 4})
    return replace(case, layout=Layout.parse(label), train=train)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "word", "label"),
    [
        ("gpt_oss", "zbv", "pp2 zbv v2 mb1"),
        ("qwen2_moe", "lora attn.q", "pp2 interleaved_zero_bubble v2 mb2"),  # frozen experts
        ("qwen3_moe", "pp2", "pp2 1f1b mb2 recompute-selective"),
        ("qwen2_moe", "lora attn.v mlp.experts", "pp2 1f1b mb2 recompute-selective"),
        ("gpt_oss", "pp2", "pp2 1f1b mb2 recompute-full"),
    ],
)
def test_memory_of_experts_is_predicted_whatever_waits_for_it(family, word, label):
    case = of_table(family, word, label)
    target = Target("cpu", route(case.train.matmul, Processor()), case.packed)
    program = lower(case.model, case.train, case.optimizer, case.layout, target)
    for rank, measured in enumerate(on_ranks(2, measure, case=case)):
        predicted = timeline(program, rank).peak.total
        assert measured.peak.total == pytest.approx(predicted, rel=0.04)
