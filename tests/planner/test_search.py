"""The search: it finds what pricing every layout finds, counts all of them, and says why not."""

import re
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.catalogue import cluster_of, find_device
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import estimated, price, worst_estimate, worst_memory
from meshwright.cost.step import StepTime
from meshwright.cost.systems import SYSTEMS
from meshwright.layout import Layout, broken
from meshwright.layout.rules import divisors
from meshwright.planner.advice import lost_by, warnings
from meshwright.planner.rank import Search, preference
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import Offload, OptimizerSpec, Recompute, Schedule, TrainSpec
from meshwright.units import format_seconds

MODEL = model_spec(
    dim=512, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=1024, vocab_size=1024, context=512
)


def setting(model=MODEL, devices=4, device="a100-40gb", memory=None, **train):
    values = {"batch": 8, "seq_len": 512, "precision": "bf16"} | train
    found = find_device(device)
    if memory is not None:
        found = replace(found, memory=memory)
    spec = TrainSpec(**values)
    cluster = cluster_of(found, devices)
    return CostInputs(
        model, spec, OptimizerSpec(), cluster, SYSTEMS["meshwright"], shipped_calibration(), "bf16"
    )


def everything(one, devices):
    """Yield every legal layout of so many devices, by trying all values of all keys."""
    train, model = one.train, one.model
    sizes = divisors(devices)
    for pp, shards, replicas, cp, tp in product(sizes, repeat=5):
        if pp * shards * replicas * cp * tp != devices:
            continue
        for zero, sp, kind, schedule, virtual, microbatch, recompute, offload in product(
            (0, 1, 2, 3),
            (False, True),
            ("ring", "ulysses"),
            get_args(Schedule),
            range(1, model.n_layers + 1),
            divisors(train.batch),
            get_args(Recompute),
            get_args(Offload),
        ):
            # What a degree of one leaves without a meaning is not counted twice.
            if (sp and tp == 1) or (kind == "ulysses" and cp == 1):
                continue
            if pp == 1 and (schedule != "1f1b" or virtual > 1):
                continue
            if zero and shards * cp == 1:
                continue
            layout = Layout(
                pp=pp,
                dp_replicate=replicas,
                dp_shard=shards,
                cp=cp,
                tp=tp,
                zero=zero,
                sp=sp,
                cp_kind=kind,
                schedule=schedule,
                virtual_stages=virtual,
                microbatch=microbatch,
                recompute=recompute,
                offload=offload,
            )
            if broken(model, train, layout) is None:
                yield layout


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def devices(request):
    return request.param


@pytest.fixture(scope="module")
def priced(devices):
    """Every legal layout of these devices: its bytes and its seconds in closed form.

    Neither follows from how much memory the devices have.
    """
    whole = setting(devices=devices)
    return {
        layout: (worst_estimate(whole, layout).total, estimated(whole, layout).time.total)
        for layout in everything(whole, devices)
    }


@pytest.mark.parametrize("is_limited", [False, True])
def test_the_best_of_all_layouts_is_found(is_limited, priced, devices):
    plenty = setting(devices=devices)
    sizes = sorted(held for held, _ in priced.values())
    limit = int(sizes[len(sizes) // 2]) if is_limited else plenty.cluster.device.memory
    limited = setting(devices=devices, memory=limit)
    search = Search(limited, devices, margin=0.0).run(9)
    assert search.considered == len(priced)
    on_device = {layout: form for layout, form in priced.items() if layout.offload != "activations"}
    fitting = [seconds for held, seconds in on_device.values() if held <= limit]
    assert (len(fitting) < len(on_device)) == is_limited
    # The search itself is in closed form; what it found is then priced by events.
    forms = [priced[ranked.layout][1] for ranked in search.ranked]
    assert min(forms) == pytest.approx(min(fitting), rel=0.01)
    assert all(ranked.memory.fits for ranked in search.ranked)
    # Each kind of layout is there once, by the best of how dp and cp share the other ranks.
    fastest: dict[tuple[int, int], float] = {}
    for layout, (held, seconds) in on_device.items():
        if held <= limit and layout.sp == (layout.tp > 1):  # the search has sp wherever it is legal
            kind = layout.pp, layout.tp
            fastest[kind] = min(seconds, fastest.get(kind, seconds))
    of_kinds = {(ranked.layout.pp, ranked.layout.tp): ranked.layout for ranked in search.ranked}
    assert len(of_kinds) == len(search.ranked)
    assert of_kinds.keys() == fastest.keys()
    for kind, layout in of_kinds.items():  # a simpler one may be preferred
        assert priced[layout][1] == pytest.approx(fastest[kind], rel=0.02)


def test_the_best_with_offload_is_found_where_nothing_else_fits(priced, devices):
    least = min(held for layout, (held, _) in priced.items() if layout.offload == "none")
    tight = setting(devices=devices, memory=int(least) - 1)
    best = Search(tight, devices, margin=0.0).run(1).ranked[0]
    fitting = [seconds for held, seconds in priced.values() if held < least]
    assert fitting
    # A simpler one may be preferred.
    assert priced[best.layout][1] == pytest.approx(min(fitting), rel=0.02)


@pytest.mark.parametrize("memory", [1_900_000_000, 60_000_000_000])
def test_prices_do_not_follow_from_the_memory_of_a_device(memory, priced, devices):
    changed = setting(devices=devices, memory=memory)
    for layout in list(priced)[::97]:
        held, seconds = priced[layout]
        assert worst_estimate(changed, layout).total == held
        assert estimated(changed, layout).time.total == seconds


def test_a_search_is_deterministic_and_ranks_by_speed():
    one = setting(devices=8, batch=16)
    first, second = (Search(one, 8).run(5) for _ in range(2))
    labels = [found.layout.label for found in first.ranked]
    assert labels == [found.layout.label for found in second.ranked]
    assert len(set(labels)) == 5
    seconds = [found.time.total for found in first.ranked]
    assert seconds == pytest.approx(sorted(seconds), rel=0.02)
    # However many are asked for, the best is the same.
    assert Search(one, 8).run(1).ranked == first.ranked[:1]
    for found in first.ranked:
        assert broken(one.model, one.train, found.layout) is None
        assert found.layout.world == 8
    assert first.reasons


def test_less_memory_shards_then_offloads_then_fits_nothing():
    seven = model_spec(preset="llama-2-7b")
    free = Search(setting(seven, 8, "h100-sxm", batch=64, seq_len=2048), 8).run(1)
    assert free.ranked[0].layout.offload == "none"
    tight = setting(seven, 2, "rtx4090", batch=64, seq_len=1024)
    assert Search(tight, 2).run(1).ranked[0].layout.offload != "none"
    tiny = setting(seven, 2, "rtx4090", memory=4_000_000_000, batch=64, seq_len=1024)
    found = Search(tiny, 2).run(1)
    assert not found.ranked
    assert found.unfit.total > found.unfit.limit
    assert found.unfit_layout is not None


@pytest.mark.slow
def test_what_a_margin_leaves_free():
    one = setting(model_spec(preset="llama-2-7b"), 8, "a100-40gb", batch=64, seq_len=2048)
    for margin in (0.0, 0.3):
        for found in Search(one, 8, margin).run(3).ranked:
            assert found.memory.total <= (1 - margin) * found.memory.limit


def test_keys_that_are_fixed_stay():
    one = setting(devices=8, batch=16)
    for pins in ({"tp": 2, "sp": False}, {"zero": 3, "dp_shard": 4}, {"schedule": "gpipe"}):
        (found,) = Search(one, 8, pins=pins).run(1).ranked or [None]
        if found is None:  # GPipe alone is dominated
            assert "gpipe" in pins.values()
            continue
        assert {key: getattr(found.layout, key) for key in pins} == pins
    free = Search(one, 8).run(1).ranked[0]
    pins = free.layout.model_dump()
    assert Search(one, 8, pins=pins).run(1).ranked[0].layout == free.layout


EIGHT = model_spec(preset="llama-3-8b")
H100 = setting(EIGHT, 16, "h100-sxm", batch=16, seq_len=8192)
CPUS = setting(devices=2, device="cpu", precision="fp32")
GPT = model_spec(preset="llama-2-7b")
A40S = setting(GPT, 16, "a40", batch=64, seq_len=2048)
V100S = setting(GPT, 8, "v100-32gb", batch=64, seq_len=2048)

WARNINGS = {
    "AdamW's states are": [
        (H100, "dp16 mb1 recompute-full", True),
        (H100, "shard16 zero1 mb1 recompute-full", False),
        (replace(H100, cluster=cluster_of(find_device("h100-sxm"), 1)), "mb1 recompute-full", True),
    ],
    "crosses nodes of 8": [
        (A40S, "tp16 sp mb1", True),
        (A40S, "dp2 tp8 sp mb1", False),
    ],
    "the pipeline is idle": [
        (H100, "tp8 sp pp2 1f1b mb8", True),
        (H100, "tp8 sp pp2 1f1b mb1", False),
    ],
    "no Ulysses: tp 1 x cp 16": [
        (H100, "zero3 cp16-ring mb1", True),
        (H100, "shard2 zero3 cp8-ring mb1", False),
        (H100, "shard2 zero3 cp8-ulysses mb1", False),
    ],
    "memory counts tensors alone": [
        (CPUS, "dp2 mb1", True),
        (H100, "dp16 mb1", False),
    ],
    "the step waits for messages: tp": [
        (A40S, "tp16 sp mb1", True),
        (A40S, "shard16 zero1 mb1", False),
    ],
    "host has to hold": [
        (A40S, "shard16 zero3 mb1 offload-params", True),
        (A40S, "shard16 zero3 mb1 offload-optimizer", True),
        (A40S, "shard16 zero3 mb1", False),
    ],
    "train.precision=fp16": [
        (V100S, "shard8 zero3 mb1", True),
        (A40S, "shard16 zero3 mb1", False),
        (CPUS, "dp2 mb1", False),
    ],
    "beyond model.context = 8192": [
        (setting(EIGHT, 16, "h100-sxm", batch=16, seq_len=16384), "zero3 cp16-ring mb1", True),
        (H100, "zero3 cp16-ring mb1", False),
    ],
    "it does not fit": [
        (H100, "dp16 mb1", True),
        (H100, "shard16 zero3 mb1 recompute-full", False),
    ],
}


@pytest.mark.parametrize(
    ("words", "one", "label", "fires"),
    [(words, *case) for words, cases in WARNINGS.items() for case in cases],
)
def test_warnings_come_from_the_numbers(words, one, label, fires):
    said = warnings(price(one, Layout.parse(label)), one)
    assert any(words in text for text in said) is fires, said


def test_a_plan_that_leaves_little_free_says_so():
    one = setting(EIGHT, 16, "h100-sxm", batch=16, seq_len=8192)
    needed = worst_memory(one, Layout.parse("shard16 zero3 mb1")).total
    for share, fires in ((0.97, True), (0.9, False)):
        device = replace(one.cluster.device, memory=int(needed / share))
        tight = replace(one, cluster=replace(one.cluster, device=device))
        said = warnings(price(tight, Layout.parse("shard16 zero3 mb1")), tight)
        assert any("stays free" in text for text in said) is fires


def test_offload_counts_what_the_host_holds():
    found = price(A40S, Layout.parse("shard16 zero3 mb1 offload-params"))
    (text,) = [text for text in warnings(found, A40S) if "host has to hold" in text]
    # 16 bytes of each of 6.738 G parameters, half of them in each of the two nodes
    assert f"{6_738_415_616 * 16 / 2 / 2**30:.2f} GiB" in text


def test_of_layouts_that_are_as_fast_the_simplest_is_best():
    plain = price(H100, Layout.parse("shard16 zero3 mb1"))
    long = price(H100, Layout.parse("shard4 zero3 tp2 sp cp2-ring mb1"))
    assert len(long.layout.label.split()) == len(plain.layout.label.split()) + 3

    def taking(found, share):
        causes = dict.fromkeys(found.time.causes, 0.0)
        return replace(found, time=StepTime(share, ({**causes, "gathers": 0.0, "compute": share},)))

    assert preference(taking(plain, 1.0)) < preference(taking(long, 0.999))
    assert preference(taking(plain, 1.0)) > preference(taking(long, 0.99))
    assert "faster, but less simple" in lost_by(taking(long, 0.999), taking(plain, 1.0))


def test_why_one_loses_adds_up_to_how_much_slower_it_is():
    wide = price(H100, Layout(tp=4, pp=4, schedule="1f1b", microbatch=4, sp=True))
    plain = price(H100, Layout(dp_shard=16, zero=3, recompute="full"))
    wide, plain = (replace(one, time=scaled(one.time, 10)) for one in (wide, plain))
    net, parts = told(lost_by(wide, plain), "s")
    assert net == pytest.approx(wide.time.total - plain.time.total, abs=0.006)
    assert sum(parts.values()) == pytest.approx(net, abs=1e-6)
    more = {cause: s - plain.time.causes[cause] for cause, s in wide.time.causes.items()}
    # What it saves is told as well as what it costs: one alone would be more than the difference.
    assert list(parts)[:2] == ["bubble", "recompute"]
    assert parts["bubble"] == pytest.approx(more["bubble"], abs=0.006)
    assert parts["bubble"] > net
    assert parts["recompute"] == pytest.approx(more["recompute"], abs=0.006)
    assert parts["recompute"] < 0
    # Below a second, the difference is in milliseconds, with fewer digits where it is larger.
    for shorter, error in ((1e-1, 0.6), (1e-2, 0.06), (1e-4, 0.006)):
        short = [replace(one, time=scaled(one.time, shorter)) for one in (wide, plain)]
        net, parts = told(lost_by(*short), "ms")
        assert sum(parts.values()) == pytest.approx(net, abs=1e-6)
        difference = (wide.time.total - plain.time.total) * shorter * 1e3
        assert net == pytest.approx(difference, abs=error)


def test_every_reason_in_a_ranking_adds_up():
    best, *others = (
        Search(setting(EIGHT, 16, "h100-sxm", batch=64, seq_len=2048), 16).run(10).ranked
    )
    slower = [one for one in others if one.time.total > best.time.total]
    assert len(slower) > 3
    for one in slower:
        net, parts = told(lost_by(one, best), "m?s")
        assert sum(parts.values()) == pytest.approx(net, abs=1e-6), lost_by(one, best)


def told(text, unit):
    """Return by how much a layout is said to be slower, and the parts of it by name."""
    whole, _, rest = text.partition(" slower: ")
    parts = [re.fullmatch(rf"([a-z ]+) ([+-][0-9.]+){unit}", part) for part in rest.split(", ")]
    net = re.fullmatch(rf"([0-9.]+){unit}", whole)
    return float(net[1]), {found[1]: float(found[2]) for found in parts}


def scaled(time, by):
    ranks = tuple({cause: s * by for cause, s in one.items()} for one in time.ranks)
    return StepTime(time.total * by, ranks, time.slowest)


@pytest.mark.parametrize(("batch", "said"), [(16, "1 microbatch for"), (32, "2 microbatches for")])
def test_an_idle_pipeline_counts_its_microbatches(batch, said):
    train = H100.train.model_copy(update={"batch": batch})
    one = replace(H100, train=train)
    found = price(one, Layout(pp=16, schedule="1f1b", microbatch=16))
    (text,) = [text for text in warnings(found, one) if "pipeline is idle" in text]
    assert f"with {said} 16 ranks" in text


@pytest.mark.parametrize(
    ("layout", "helps"),
    [
        (
            {"microbatch": 4},
            "a larger train.batch, a smaller layout.microbatch or virtual stages would fill it",
        ),
        ({}, "a larger train.batch or virtual stages would fill it"),
        ({"schedule": "zbv", "virtual_stages": 2}, "ranks: a larger train.batch would fill it"),
        ({"pp": 32}, "ranks: a larger train.batch would fill it"),  # a stage of one layer
    ],
)
def test_nobody_is_advised_to_have_what_a_layout_has(layout, helps):
    layout = Layout(**{"pp": 8, "schedule": "1f1b", "microbatch": 1, **layout})
    one = setting(EIGHT, 2, "h100-sxm", batch=layout.pp * layout.microbatch, seq_len=2048)
    (text,) = [text for text in warnings(price(one, layout), one) if "pipeline is idle" in text]
    assert text.endswith(helps)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (2e-5, "0ms"), (0.00434, "4.3ms"), (0.00996, "10ms"), (0.2, "200ms")],
)
def test_milliseconds_have_two_digits(seconds, text):
    assert format_seconds(seconds) == text


def test_a_later_pass_looks_into_no_core_again(monkeypatch):
    """A layout that does not fit by its price starts a pass anew: only its own core changes."""
    search, looked, passes, refused = Search(setting(devices=8), 8), [], [], []
    best_of, a_pass, priced = search._best_of, search._pass, search.fits.priced

    def price_one(timed):  # of each of the first four passes the best layout is too large
        if len(refused) < min(len(passes), 4) and timed.layout not in refused:
            refused.append(timed.layout)
            held = timed.memory
            term = held.terms[0]._replace(bytes=2.0 * search.limit)
            search.fits._exact[timed.layout] = replace(held, terms=(term,))
        return priced(timed)

    def look(core, limit, offloaded):
        looked.append((core.layout, limit, offloaded, search.nearest is None))
        return best_of(core, limit, offloaded)

    def counted(*asked):
        if "none" in asked[2]:  # those with offload follow
            passes.append(len(looked))
        return a_pass(*asked)

    monkeypatch.setattr(search.fits, "priced", price_one)
    monkeypatch.setattr(search, "_best_of", look)
    monkeypatch.setattr(search, "_pass", counted)
    found = search.run(3)
    assert len(passes) == 5
    assert not {one.layout for one in found.ranked} & set(refused)
    # What is asked again with the same limit is the core of a layout that was refused.
    assert len(looked) - len(set(looked)) <= len(refused)


def test_the_nearest_of_all_layouts_is_shown_where_none_fits(priced, devices):
    tiny = setting(devices=devices, memory=1_000_000)
    search = Search(tiny, devices, margin=0.0).run(3)
    assert not search.ranked
    assert search.considered >= sum(search.reasons.values())  # some stand for several
    least = min(held for held, _ in priced.values())
    assert worst_estimate(tiny, search.unfit_layout).total <= 1.02 * least
