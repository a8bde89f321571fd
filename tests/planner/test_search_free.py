"""A free search is never slower than one that holds a layout key fixed, by the planner's price.

All but one value: activations are offloaded on request, or where nothing else fits.
"""

from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.catalogue import cluster_of, find_device
from meshwright.cost.inputs import CostInputs, layers_of_ranks, work_of
from meshwright.cost.step import transfer_seconds
from meshwright.cost.systems import SYSTEMS
from meshwright.planner.plan import plan
from meshwright.planner.prices import preference
from meshwright.planner.rank import Search
from meshwright.planner.space import schedules
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import Offload, OptimizerSpec, Recompute, TrainSpec

# A search compares closed forms, and only what it finds by events: they differ by so much.
CLOSED = 0.01
DEVICES = ("a100-40gb", "h100-sxm", "rtx4090", "a40")


def random_setting(random):
    """A random model, batch and cluster: mostly one in which memory is scarce."""
    heads = random.choice((4, 8, 16))
    mixture = {}
    if random.random() < 0.3:
        mixture = {"family": "mixtral", "experts": random.choice((4, 8)), "top_k": 2}
    model = model_spec(
        dim=heads * 64,
        n_layers=random.choice((3, 4, 6, 8, 16)),
        n_heads=heads,
        n_kv_heads=random.choice((2, 4)),
        ffn_dim=heads * random.choice((128, 256)),
        vocab_size=random.choice((1024, 1021, 32000)),
        context=4096,
        **mixture,
    )
    train = TrainSpec(
        batch=random.choice((4, 8, 16, 32)),
        seq_len=random.choice((512, 2048, 4096)),
        precision=random.choice(("bf16", "fp32")),
    )
    device = find_device(random.choice(DEVICES))
    device = replace(device, memory=int(random.choice((1.5, 3, 6, 20)) * 1e9))
    cluster = cluster_of(device, random.choice((1, 2, 4, 8)))
    calibration = shipped_calibration()
    return CostInputs(
        model, train, OptimizerSpec(), cluster, SYSTEMS["meshwright"], calibration, train.precision
    )


def best(setting, pins):
    found = Search(setting, setting.cluster.devices, pins=pins).run(1).ranked
    return found[0] if found else None


def fixed(random):
    """One key of a layout with a value."""
    values = {
        "pp": (1, 2, 4),
        "dp_replicate": (1, 2, 4),
        "dp_shard": (1, 2, 4),
        "cp": (1, 2),
        "tp": (1, 2, 4),
        "zero": (0, 1, 2, 3),
        "microbatch": (1, 2, 4),
        "recompute": get_args(Recompute),
        "offload": [one for one in get_args(Offload) if one != "activations"],
        "schedule": ("1f1b", "gpipe", "interleaved_1f1b", "zbv", "naive"),
        "virtual_stages": (1, 2, 3),
        "sp": (False, True),
        "cp_kind": ("ring", "ulysses"),
    }
    key = random.choice(sorted(values))
    return {key: random.choice(values[key])}


@pytest.mark.often(1)
@pytest.mark.parametrize("seed", range(6))
def test_no_key_that_is_held_fixed_makes_a_plan_faster(seed):
    random = Random(seed)
    setting = random_setting(random)
    free = best(setting, {})
    for _ in range(12):
        pins = fixed(random)
        held = best(setting, pins)
        if held is not None:
            assert free is not None, (pins, held.layout.label)
            ratio = preference(held) / preference(free)
            assert ratio > 1 - CLOSED, (pins, held.layout.label, free.layout.label, ratio)


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("words", "fewest"),
    [
        (["model.preset=llama-3-8b", "cluster.preset=rtx4090"], 13_000),
        (
            ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.devices_per_node=2"],
            19_000,
        ),
        (["model.preset=qwen3-32b", "cluster.preset=h100-sxm"], 17_000),
    ],
)
def test_offload_is_chosen_where_it_is_faster(words, fewest):
    """States on the host leave room for less recomputation, or for larger microbatches."""
    made = plan(load_config(None, words))
    assert made.best.layout.offload in ("optimizer", "params")
    assert made.best.tokens_per_s > fewest
    untried = [reason for reason in made.found.reasons if reason.startswith("offload")]
    assert untried == [next(why for why in made.found.reasons if "only on request" in why)]
    assert sum(made.found.reasons.values()) <= made.found.considered


@pytest.mark.often(12)
@pytest.mark.parametrize("seed", range(40))
def test_a_bound_is_below_every_pace(seed):
    """A pipeline takes no less than its microbatches and its least idle time; those of a division
    no less than its bound. The first rank of none has fewer bytes than a core is sorted out by."""
    random = Random(seed)
    setting = random_setting(random)
    search = Search(setting, setting.cluster.devices)
    for node in search._starts()[:: random.choice((3, 7))]:
        for sized in search._below(node, ("none",)):
            assert node.bound <= sized.bound, sized.choice.layout.label
            for cored in search._below(sized, ("none",)):
                assert sized.bound <= cored.bound
                _check_paces(search, cored)


def test_the_bound_of_a_division_is_hardly_below_those_of_its_microbatches():
    """Where layers take nearly all of the time, a bound 5% higher would cut off the fastest."""
    setting = random_setting(Random(0))
    model = model_spec(
        dim=2048,
        n_layers=16,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=8192,
        vocab_size=1024,
        context=4096,
    )
    train = TrainSpec(batch=64, seq_len=2048, precision="bf16")
    cluster = cluster_of(find_device("h100-sxm"), 1)
    search = Search(replace(setting, model=model, train=train, cluster=cluster, products="bf16"), 1)
    (node,) = search._starts()
    least = min(sized.bound for sized in search._below(node, ("none",)))
    assert 0.96 * least < node.bound <= least


def _check_paces(search, node):
    setting, core = search.setting, node.choice
    count, layers = core.microbatches, setting.model.n_layers
    transfer = transfer_seconds(search.kernels, core.layout, work_of(setting, core.layout))
    for order in schedules(core.layout.pp, layers, count):
        pace = search._paces.pace(core.layout, order, count, transfer)
        assert node.bound <= pace.plain[1] * (1 + 1e-9), (core.layout.label, order)
        if search._paces.loses(order, core.layout.pp, count) is None:
            held_layers = layers_of_ranks(setting, pace.layout)[0]
            states = search.prices.shardings.least_states(core.layout, held_layers, ("none",))
            needed = search._activations(pace.layout, 0) + states
            assert search._least_bytes(core, ("none",)) <= needed * (1 + 1e-9), (core, order)


@pytest.mark.often(5)
@pytest.mark.parametrize("seed", range(30))
def test_a_search_without_bounds_ranks_the_same_layouts(seed, monkeypatch):
    """With the same exact prices, also where a listed layout turns out not to fit."""
    random = Random(seed)
    setting = random_setting(random)
    pins = fixed(random) if seed % 3 == 0 else {}
    bounded = Search(setting, setting.cluster.devices, pins=pins).run(4)
    monkeypatch.setattr(Search, "_floor", lambda *_: 0.0)
    monkeypatch.setattr(Search, "_evenly", lambda *_: 0.0)
    free = Search(setting, setting.cluster.devices, pins=pins).run(4)
    assert bounded.considered == free.considered
    assert bounded.ranked == free.ranked
