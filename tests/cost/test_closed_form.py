"""The closed form by which a search compares memory, held to the walk that prices layouts.

Both read the same rows of the program, so what they count is equal to the byte: states, and what a
layer saves and defers. They differ in the moment: the closed form adds up the most of each
category, the walk takes the highest moment of a step. Random presets, layouts and optimizers.
"""

from dataclasses import replace
from functools import partial
from random import Random
from statistics import median

import pytest

from meshwright.cost.byte_count import ByteCount
from meshwright.cost.inputs import layers_of_ranks
from meshwright.cost.memory import kept_of, model_states
from meshwright.cost.price import memories, worst_estimate, worst_memory
from meshwright.cost.timeline import Walk, layer_bytes
from meshwright.layout import broken
from meshwright.planner import prices
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.planner.rank import Search
from meshwright.planner.space import (
    RECOMPUTES,
    divisions,
    offloads,
    schedules,
    shardings,
    with_schedule,
    with_sharding,
)
from meshwright.program.lower import lower
from meshwright.program.sizes import Sizes
from meshwright.spec.families import FAMILIES
from meshwright.spec.loading import load_config
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.presets import PRESETS
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

BASE = cost_inputs_of(load_config(None, ("cluster.preset=h100-sxm",)))
# Optimizers, with what else decides the bytes of weights, gradients and states.
TRAINED = (
    *((OptimizerSpec(name=name), {}) for name in OPTIMIZERS),
    (OptimizerSpec(name="sgd", momentum=0.9), {"reduce_dtype": "same"}),
    (OptimizerSpec(state_dtype="bf16"), {}),
    (OptimizerSpec(rounding="stochastic", state_dtype="bf16"), {"master": "none"}),
    (OptimizerSpec(name="lion"), {"master": "none", "reduce_dtype": "same"}),
)
DEVICES = (8, 16, 24, 32, 64)
BY_FAMILY = {
    family: [name for name in sorted(PRESETS) if model_spec(preset=name).family == family]
    for family in FAMILIES
}
# Every family, with its experts, latent attention, windows or recurrences; then others at random.
SEEDS = range(4 * len(FAMILIES))


def drawn(seed, *, offloaded=("none", "optimizer", "params", "activations")):
    """Return cost inputs of a preset, and a layout that it allows; families in turn."""
    random = Random(seed)
    model = model_spec(preset=random.choice(BY_FAMILY[list(FAMILIES)[seed % len(FAMILIES)]]))
    optimizer, more = random.choice(TRAINED)
    devices = random.choice(DEVICES)
    batch = devices * random.choice((2, 4, 8))
    train = TrainSpec(batch=batch, seq_len=2048, precision="bf16", **more)
    setting = replace(BASE, model=model, train=train, optimizer=optimizer)
    legal = [
        division.core(microbatch, recompute)
        for division in divisions(model, train, devices)
        for microbatch in division.microbatches
        for recompute in RECOMPUTES
    ]
    while True:
        core = random.choice(legal)
        count = core.layout.microbatches(batch)
        orders = list(schedules(core.layout.pp, model.n_layers, count))
        if not orders:
            continue
        layout = with_schedule(core.layout, random.choice(orders))
        shards = list(shardings(layout.dp_replicate, layout.cp, layout.expert_data))
        sharding = random.choice(shards)
        layout = with_sharding(
            layout, sharding, random.choice(list(offloads(sharding.zero, offloaded)))
        )
        if broken(model, train, layout) is None:
            return on_cluster(setting, layout), layout


def lowered(setting, layout):
    return lower(setting.model, setting.train, setting.optimizer, layout, setting.target)


@pytest.mark.often(30)
@pytest.mark.parametrize("seed", SEEDS)
def test_states_are_those_of_the_walk(seed):
    setting, layout = drawn(seed)
    program = lowered(setting, layout)
    for place, held_layers in enumerate(layers_of_ranks(setting, layout)):
        walk = Walk(program, layout.mesh.rank({"pp": place}), ByteCount())
        for units in walk.units.values():
            units.hold()
        closed = dict.fromkeys(("weights", "optimizer"), 0)
        for term in model_states(setting, layout, held_layers):
            if term.category in closed:
                closed[term.category] += term.bytes
        walked = {category: walk.bytes_held.held.get(category, 0) for category in closed}
        assert closed == walked, (layout.label, place)


@pytest.mark.often(30)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_layer_saves_and_defers_is_that_of_the_walk(seed):
    """Up to the rounding of tokens by expert: of one sequence here, of a microbatch there."""
    setting, layout = drawn(seed, offloaded=("none",))
    program, closed = lowered(setting, layout), kept_of(setting, layout)
    approx = partial(pytest.approx, rel=0.015 if setting.model.experts else 1e-3)
    for place, kind in enumerate(setting.model.layer_kinds):
        stage = next(
            stage
            for stage in program.stages
            if kind in {setting.model.layer(layer) for layer in stage.layers}
        )
        rows = layer_bytes(program, Sizes.of(program), stage, kind, 0)
        saved = {f"activations: {name}": sizes[place] for name, sizes in closed.saved.items()}
        assert {name: size for name, size in saved.items() if size} == approx(dict(rows.kept))
        deferred = sum(
            need.deferred + sum(size for _, size in freed)
            for need, freed in rows.backward
            if need.deferred
        )
        assert closed.deferred[place] == approx(deferred)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_peaks_are_near_those_of_the_walk(first):
    """The most of each category is not there at once, so the closed form is mostly above; it takes
    stages as equal, so it may be below. With offload they differ by more (decision 0129)."""
    shares = {}
    for seed in SEEDS[first::4]:
        setting, layout = drawn(seed, offloaded=("none",))
        walked = max(memory.total for memory in memories(setting, layout))
        shares[layout.label] = worst_estimate(setting, layout).total / walked
    assert min(shares.values()) > 0.8, shares
    assert max(shares.values()) < 1.6, shares
    assert 0.97 < median(shares.values()) < 1.05, shares


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "preset", ["llama-3-8b", "qwen3-30b-a3b", "granite-4.0-h-micro", "gpt-oss-20b"]
)
def test_a_search_by_the_walk_is_not_faster(preset, monkeypatch):
    """The closed form leaves out no layout that would have been the plan."""
    words = (f"model.preset={preset}", "cluster.preset=h100-sxm", "cluster.nodes=1")
    setting = cost_inputs_of(load_config(None, (*words, "train.batch=64", "train.seq_len=8192")))
    closed = Search(setting, 8).run(1).ranked
    by_walk = lambda setting, layout, kept_bytes=None: worst_memory(setting, layout)  # noqa: E731
    monkeypatch.setattr(prices, "worst_estimate", by_walk)
    walked = Search(setting, 8).run(1).ranked
    assert len(closed) == len(walked)
    for ours, exact in zip(closed, walked, strict=True):
        assert ours.time.total <= 1.005 * exact.time.total, (ours.layout.label, exact.layout.label)
