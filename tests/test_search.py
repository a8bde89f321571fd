"""The search: it finds what pricing every layout finds, counts all of them, and says why not."""

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from meshwright.layout import Layout, broken
from meshwright.layout.rules import divisors
from meshwright.predict.calibration import shipped_calibration
from meshwright.predict.catalogue import cluster_of, find_device
from meshwright.predict.price import price, worst_memory
from meshwright.predict.setting import Setting
from meshwright.predict.stacks import STACKS
from meshwright.search.advice import fewest_devices, lost_by, warnings
from meshwright.search.rank import Search
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import Offload, Recompute, Schedule, TrainSpec

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
    return Setting(model, spec, cluster, STACKS["meshwright"], shipped_calibration(), "bf16")


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


@pytest.mark.parametrize("memory", [None, 1_900_000_000])
def test_the_best_of_all_layouts_is_found(memory):
    one = setting(memory=memory)
    found = Search(one, 4, margin=0.0).run(3)
    layouts = list(everything(one, 4))
    assert found.considered == len(layouts)
    best = min(
        price(one, layout, events=False).time.total
        for layout in layouts
        if layout.offload == "none" and worst_memory(one, layout).fits
    )
    # The search itself is in closed form; what it found is then priced by events.
    forms = [price(one, ranked.layout, events=False).time.total for ranked in found.ranked]
    assert min(forms) == pytest.approx(best, rel=0.01)
    assert all(ranked.memory.fits for ranked in found.ranked)


def test_a_search_is_deterministic_and_ranks_by_speed():
    one = setting(devices=8, batch=16)
    first, second = (Search(one, 8).run(5) for _ in range(2))
    labels = [found.layout.label for found in first.ranked]
    assert labels == [found.layout.label for found in second.ranked]
    assert len(set(labels)) == 5
    speeds = [found.tokens_per_s for found in first.ranked]
    assert speeds == sorted(speeds, reverse=True)
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


def test_what_a_margin_leaves_free():
    one = setting(model_spec(preset="llama-2-7b"), 8, "a100-40gb", batch=64, seq_len=2048)
    for margin in (0.0, 0.3):
        for found in Search(one, 8, margin).run(3).ranked:
            assert found.memory.total <= (1 - margin) * found.memory.limit


def test_warnings_come_from_the_numbers():
    one = setting(model_spec(preset="llama-3-8b"), 16, "h100-sxm", batch=16, seq_len=8192)
    wide = price(one, Layout(tp=8, pp=2, schedule="1f1b", microbatch=8, sp=True))
    text = " ".join(warnings(wide, one))
    assert "the pipeline is idle for" in text
    states = price(one, Layout(dp_replicate=16, tp=1, recompute="full"))
    assert "Adam's states are" in " ".join(warnings(states, one))
    assert "fewer" not in lost_by(wide, states)
    cpu = replace(one, cluster=cluster_of(find_device("cpu"), 2))
    assert "brings nothing" in " ".join(warnings(price(cpu, Layout(dp_replicate=2)), cpu))


def test_the_fewest_devices():
    one = setting(model_spec(preset="llama-2-7b"), 8, "h100-sxm", batch=64, seq_len=2048)
    fewest = fewest_devices(one, 8)
    assert fewest in (1, 2, 4)
