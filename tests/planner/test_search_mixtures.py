"""Searches of models whose layers are not alike: memory is that of the rank that holds most."""

from operator import mul

import pytest

from meshwright.cost.microbatch import parts_of
from meshwright.cost.price import worst_estimate, worst_memory
from meshwright.layout import Layout
from meshwright.planner.lightest import lightest_of
from meshwright.planner.rank import Search
from meshwright.planner.space import RECOMPUTES, Schedule, with_schedule
from meshwright.spec.resolve import model_spec
from test_search import setting


@pytest.mark.parametrize("words", ["pp8", "pp16", "pp32", "pp16 recompute-full"])
def test_the_estimate_is_of_the_rank_that_holds_most(words):
    """In DeepSeek-V3 the first layers have no experts: the fourth of 32 ranks holds most."""
    model = model_spec(preset="deepseek-v3")
    layout = Layout.parse(f"shard16 zero1 ep8 {words} mb1")
    one = setting(model, 16 * layout.pp, "h100-sxm", batch=16 * 2 * layout.pp, seq_len=4096)
    found, exact = worst_estimate(one, layout), worst_memory(one, layout)
    assert found.rank == exact.rank
    assert found.total == pytest.approx(exact.total, rel=0.15)


def test_fewest_looks_at_the_rank_that_holds_most():
    model = model_spec(preset="deepseek-v3")
    core = Layout.parse("dp16 ep8 pp32 mb1")
    one = setting(model, 512, "h100-sxm", batch=16 * 64, seq_len=4096)
    light = lightest_of(one, core, 64)
    assert light.bytes == pytest.approx(worst_estimate(one, light.layout).total)


@pytest.mark.often(1)
@pytest.mark.parametrize("preset", ["deepseek-v3", "gpt-oss-20b"])
def test_prices_of_parts_are_those_of_each_layout(preset):
    """What layouts share is computed once: layers without experts, ends, bounds."""
    model = model_spec(preset=preset, n_layers=4)
    assert len(model.layer_kinds) == 2
    one = setting(model, 8, "h100-sxm", batch=32, seq_len=512)
    search = Search(one, 8)
    every = [
        (division, division.core(microbatch, recompute))
        for division in search._divisions
        for microbatch in division.microbatches
        for recompute in RECOMPUTES
    ]
    assert len(every) > 500
    for division, core in every[::7]:
        layout = core.layout
        parts = parts_of(one, search.kernels, layout)
        assert search.prices.parts(layout) == parts
        layers, first, last = parts.totals
        assert search.prices.least(division, layout.microbatch) <= (
            sum(map(mul, layers, search._kinds)) + first + last
        )
    split = with_schedule(Layout.parse("ep2 pp2 tp2 sp etp1"), Schedule("zbv", 2))
    assert search.prices.parts(split, True) == parts_of(one, search.kernels, split)
