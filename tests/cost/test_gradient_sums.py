"""What adding a microbatch's gradients to those before it takes, which grows with weights alone."""

from dataclasses import replace

import pytest

from meshwright.cost.elements import elements_of
from meshwright.cost.inputs import layers_of_ranks
from meshwright.cost.price import price
from meshwright.cost.sums import sums_of
from meshwright.cost.systems import SYSTEMS
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of
from meshwright.spec.loading import load_config


def setting(precision="bf16", system="meshwright"):
    words = ["model.preset=olmoe-1b-7b", "train.batch=16", f"train.precision={precision}"]
    cluster = ["cluster.preset=h100-sxm", "cluster.devices_per_node=8"]
    found = cost_inputs_of(load_config(None, [*words, "train.seq_len=512", *cluster]), None, 8)
    return replace(found, system=SYSTEMS[system])


@pytest.mark.parametrize(
    ("precision", "label", "moved"),
    [
        ("bf16", "dp8 mb2", 6),  # one microbatch: its gradients are written in fp32
        ("bf16", "dp8 mb1", (6 + 10) / 2),
        ("fp32", "dp8 mb2", 0),  # its gradients are the sum
        ("fp32", "tp8 mb4", 12 * 3 / 4),
        ("bf16", "shard8 zero3 mb1", (6 + 10) / 2),
    ],
)
def test_sums_move_the_bytes_of_gradients(precision, label, moved):
    found, layout = setting(precision), Layout.parse(label)
    kernels = found.kernels()
    (held,) = layers_of_ranks(found, layout)
    weights = elements_of(found.model, layout, held).total
    seconds = sums_of(found, kernels, layout).of(held)
    assert seconds == pytest.approx(weights * moved / kernels.bandwidth, rel=1e-6)


def test_a_step_takes_as_much_longer():
    layout = Layout.parse("dp8 mb1")
    with_sums = setting()
    without = replace(with_sums, system=replace(with_sums.system, sums_apart=False))
    kernels = with_sums.kernels()
    (held,) = layers_of_ranks(with_sums, layout)
    more = 2 * sums_of(with_sums, kernels, layout).of(held)
    ours, others = price(with_sums, layout).time, price(without, layout).time
    assert ours.total - others.total == pytest.approx(more)
    assert ours.causes["compute"] - others.causes["compute"] == pytest.approx(more)
    assert more > 0.1 * others.causes["compute"], "of a mixture's weights few are used by a token"


def test_other_systems_have_it_in_their_constants():
    found, layout = setting(system="megatron-core"), Layout.parse("dp8 mb1")
    (held,) = layers_of_ranks(found, layout)
    assert sums_of(found, found.kernels(), layout).of(held) == 0
