"""Prices follow the program: its messages, its elements, its bytes, its passes, not its words."""

from dataclasses import replace

import pytest

from meshwright.cost import work
from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.catalogue import cluster_of, find_device
from meshwright.cost.data_messages import data_messages, unit_messages
from meshwright.cost.elements import elements_of
from meshwright.cost.inputs import CostInputs, layers_of_ranks
from meshwright.cost.memory import model_states
from meshwright.cost.price import estimated, price, worst_estimate
from meshwright.cost.profile import predicted_profile
from meshwright.cost.step import pace_of
from meshwright.cost.systems import SYSTEMS
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout
from meshwright.planner.lightest import lightest
from meshwright.planner.rank import Search
from meshwright.planner.space import RECOMPUTES
from meshwright.program.collectives import collectives, of_microbatches
from meshwright.program.lower import lower
from meshwright.program.shards import data_rank
from meshwright.program.target import Target
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

MODEL = model_spec(
    dim=1024, n_layers=6, n_heads=16, n_kv_heads=8, ffn_dim=4096, vocab_size=16000, context=512
)
TIED = MODEL.model_copy(update={"tie_embeddings": True})
OURS = SYSTEMS["meshwright"]


def setting(device="h100-sxm", devices=8, model=MODEL, **train):
    values = {"batch": 32, "seq_len": 512, "precision": "bf16"} | train
    cluster = cluster_of(find_device(device), devices)
    spec = TrainSpec(**values)
    return CostInputs(
        model, spec, OptimizerSpec(), cluster, OURS, shipped_calibration(), spec.precision
    )


@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp32"), ("h100-sxm", "bf16")])
def test_the_lightest_layout_takes_what_its_price_says(device, precision):
    one = setting(device, precision=precision)
    light = lightest(one, 8)
    assert light is not None
    # As the search takes it: one microbatch count for each data rank, a sequence at a time.
    count = one.train.batch // light.layout.dp
    train = one.train.model_copy(update={"batch": count * light.layout.dp})
    found = worst_estimate(replace(one, train=train), light.layout)
    assert light.bytes == pytest.approx(found.total, rel=1e-9)


@pytest.mark.parametrize(
    ("device", "zero", "schedule", "phase"),
    [
        ("cpu", 1, "1f1b", "step"),
        ("cpu", 2, "1f1b", "step"),
        ("gpu", 1, "1f1b", "step"),
        ("gpu", 2, "1f1b", "step"),
        ("gpu", 2, "zbv", "backward"),  # with the second half of each microbatch's backward
    ],
)
def test_the_phase_of_replicas_sums_says_how_often_they_travel(device, zero, schedule, phase):
    pipeline = {"pp": 2, "virtual_stages": 2, "schedule": schedule} if schedule == "zbv" else {}
    layout = Layout(dp_replicate=2, dp_shard=2, zero=zero, microbatch=1, **pipeline)
    program = lower(
        MODEL, TrainSpec(batch=32, seq_len=512), OptimizerSpec(), layout, Target(device)
    )
    sums = [one for one in collectives(program, 0) if one.axis == "replicate"]
    assert {one.phase for one in sums} == {phase}
    units = MODEL.n_layers // layout.pp + 3  # blocks, and what is in none: three at most
    assert (sum(one.count for one in sums) <= units) == (phase == "step")


@pytest.mark.parametrize(
    "label", ["cp2-ring mb2", "dp2 cp2-ulysses mb2", "shard2 zero1 cp2-ring mb2"]
)
def test_a_sum_of_gradients_has_the_wait_and_the_count_of_targets_next_to_none(label):
    """Without ZeRO ranks of one context sum gradients, too."""
    layout = Layout.parse(label)
    one = setting("cpu", layout.world, precision="fp32")
    (rank, *_) = predicted_profile(one, layout).ranks
    waits = {(t.kind, t.axis, t.bytes): t.seconds for t in rank.traffic}
    data = {key: wait for key, wait in waits.items() if key[1] in ("shard", "replicate", "data")}
    assert all(wait is not None and wait > 0 for wait in data.values())
    assert data["all_reduce", "data", 8] < 0.01 * sum(data.values())


@pytest.mark.parametrize(
    "label", ["pp2 1f1b mb2", "pp3 1f1b mb2", "pp2 zbv v2 mb2", "tp2 pp2 1f1b mb2"]
)
@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
def test_every_pipeline_rank_updates_the_elements_that_it_holds(label, model):
    """The last stage has a copy of the embedding, where the head is tied to it."""
    layout, one = Layout.parse(label), setting(model=model)
    program = lower(model, one.train, one.optimizer, layout)
    for place, held in enumerate(layers_of_ranks(one, layout)):
        at = layout.mesh.coordinates(layout.mesh.rank({"pp": place}))
        names = [n for stage in program.held(place) for n in program.parameters(stage)]
        real = 0
        for name in names:
            elements = 1
            for size in program.shardings[name].shape(at["tp"], data_rank(layout, at)):
                elements *= size
            real += elements
        assert elements_of(model, layout, held, is_padded=False).total == real


@pytest.mark.parametrize("reduce_dtype", ["fp32", "same"])
def test_gradients_travel_in_the_dtype_of_the_program(reduce_dtype):
    layout = Layout.parse("dp8 mb2")
    one = setting(reduce_dtype=reduce_dtype)
    program = lower(MODEL, one.train, one.optimizer, layout, one.target)
    sent = sum(m.bytes * m.count for m in collectives(program, 0) if m.axis == "replicate")
    kernels, held = one.kernels(), layers_of_ranks(one, layout)[0]
    seconds = kernels.network.seconds("all_reduce", sent, 8, 1, "replicate")
    assert data_messages(one, kernels, layout, held) == pytest.approx(seconds)


@pytest.mark.parametrize("zero", [2, 3])
def test_weights_are_gathered_in_the_bytes_of_the_program(zero):
    """In float8 those of products, which the scales travel before."""
    model = MODEL.model_copy(update={"vocab_size": 2000})  # so that a block is the largest unit
    layout, one = Layout.parse(f"shard8 zero{zero} mb2"), setting(model=model, fp8=True)
    kernels, held = one.kernels(), layers_of_ranks(one, layout)[0]
    sent = collectives(lower(model, one.train, one.optimizer, layout, one.target), 0)
    weights = [m for m in sent if m.purpose == "weights"]
    (scales,) = [m for m in sent if m.purpose == "scales"]

    def seconds(kind, size):
        return kernels.network.seconds(kind, size, 8, 1, "shard")

    step = seconds(scales.kind, scales.bytes)
    states = {term.category: term.bytes for term in model_states(one, layout, held)}
    if zero == 2:
        size = sum(m.bytes * m.count for m in weights)
        step += seconds("all_gather", size)
        assert states["gathered"] == size
    else:
        block = next(m.bytes for m in weights if m.reason.endswith("a block"))
        found = unit_messages(one, kernels, layout).gather
        assert found == pytest.approx(seconds("all_gather", block))
        assert states["gathered"] == 2 * block == 2 * max(m.bytes for m in weights)
    assert data_messages(one, kernels, layout, held) == pytest.approx(step)


@pytest.mark.often(2)
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("device", ["cpu", "h100-sxm"])
def test_a_search_goes_by_the_price(device, devices):
    """With what the host adds, and with the overlap of the slowest pipeline rank."""
    one = setting(device, devices, precision="fp32")
    search = Search(one, devices)
    best = {}
    search._pass(search._starts(), 8, ("none",), best)
    assert best
    for seconds, layout in best.values():
        assert seconds == pytest.approx(estimated(one, layout).time.total, rel=1e-9)
    for division in search._divisions:
        for microbatch in division.microbatches:
            for recompute in RECOMPUTES:
                core = division.core(microbatch, recompute)
                assert search._bound(core) <= estimated(one, core.layout).time.total


@pytest.mark.parametrize(
    ("label", "share"),
    [
        ("cp2-ulysses mb2", 1 / 2),
        ("cp2-ulysses mb2 recompute-full", 2 / 3),
    ],
)
def test_context_messages_are_waited_for_in_their_own_pass(label, share):
    layout, one = Layout.parse(label), setting(devices=2)
    pace = pace_of(one, one.kernels(), layout)
    stage = lower(MODEL, one.train, one.optimizer, layout).stages[0]
    forward, backward = pace.passes(stage)
    assert forward.cp > 0
    assert backward.cp / (forward.cp + backward.cp) == pytest.approx(share)


@pytest.mark.parametrize("label", ["tp2 sp mb2 recompute-full", "tp2 mb2", "tp2 cp2-ring mb2"])
def test_no_price_hangs_on_the_words_of_a_message(label, monkeypatch):
    layout = Layout.parse(label)
    one = setting(devices=layout.world)
    before = price(one, layout).time.causes

    def wordless(program):
        return tuple(replace(m, reason="") for m in of_microbatches(program))

    monkeypatch.setattr(work, "of_microbatches", wordless)
    work.layout_work.cache_clear()
    assert price(setting(devices=layout.world), layout).time.causes == before
    work.layout_work.cache_clear()


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["two ends", "tied"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("label", ["shard8 mb1", "shard4 pp2 1f1b mb1", "shard4 tp2 mb1"])
def test_what_zero_sends_in_a_microbatch_is_priced_as_the_program_says(model, zero, label):
    """Embedding and head, too: in each pass that gathers them, message by message."""
    one = setting(model=model)
    layout = Layout.parse(f"zero{zero} {label}")
    kernels, found = one.kernels(), unit_messages(one, one.kernels(), layout)
    program = lower(one.model, one.train, one.optimizer, layout, Target("gpu"))
    for place, held in enumerate(layers_of_ranks(one, layout)):
        rank = layout.mesh.rank({"pp": place})
        sent = sum(
            message.count
            * kernels.network.seconds(message.kind, message.bytes, layout.shard_ranks, layout.tp)
            for message in collectives(program, rank)
            if message.axis == "shard" and message.phase in ("forward", "backward")
        )
        mine = held.layers * ((zero == 3) * 2 * found.gather + found.reduce)
        mine += sum(found.last) * held.has_head
        mine += sum(found.first) * (held.has_embedding and not (found.is_joined and held.has_head))
        assert program.microbatches * mine == pytest.approx(sent, rel=1e-6)


def test_the_ends_are_waited_for_where_they_are_held():
    wide = MODEL.model_copy(update={"vocab_size": 256000})
    layout = Layout.parse("shard4 zero3 pp2 1f1b mb1")
    gathers = [
        pace_of(one, one.kernels(), layout).gathers
        for one in (setting(model=model) for model in (MODEL, wide))
    ]
    first, last = (
        [
            one.passes(RankLayers((0,), at == "first", at == "last", int(at == "first")))
            for one in gathers
        ]
        for at in ("first", "last")
    )
    assert first[1][0] > 10 * first[0][0]  # the embedding, in the forward
    assert last[1][1] > 10 * last[0][1]  # the head, in the backward
    assert last[1][0] == pytest.approx(last[0][0])  # the norm
