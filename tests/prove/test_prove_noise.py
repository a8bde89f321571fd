"""What a tensor may be off by: measured noise, of which there are several samples."""

from dataclasses import replace

import pytest
import torch

from meshwright.layout import Layout
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.expected import Expected
from meshwright.prove.matrix import matrix
from meshwright.prove.optimizer import comparable
from meshwright.prove.oracle import _Model
from meshwright.prove.reference import run_gradients, run_reference, shared_reference
from meshwright.prove.suite import _KEPT, Suite
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import ranks

SIZES = {"dim": 64, "n_layers": 1, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 128, "vocab_size": 128}


def make_case(label: str, precision: str = "fp32", batch: int = 8) -> Case:
    train = TrainSpec(batch=batch, seq_len=32, precision=precision)
    return Case(model_spec(**SIZES), train, Layout.parse(label))


def test_an_update_that_vanishes_may_be_one_rounding_of_a_weight():
    """The bias of keys that are not rotated: its gradient is noise, its update an ulp or none."""
    none, bias = {"bias": torch.zeros(8)}, {"bias": torch.full((8,), 0.25)}
    ulp = torch.zeros(8)
    ulp[3] = 2.0**-25
    error, bound = Expected(none, [none], bias).difference("bias", ulp)
    assert error <= bound
    for found in (64 * ulp, torch.full((8,), 2.0**-23)):
        error, bound = Expected(none, [none], bias).difference("bias", found)
        assert error > bound
    error, bound = Expected(none, [none]).difference("bias", ulp)
    assert error > bound


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_samples_of_the_noise_differ_and_the_largest_counts(precision):
    reference = run_reference(make_case("dp2 mb2", precision))
    name = "layers.0.mlp.gate.weight"
    exact, samples = reference.exact.gradients, [one.gradients for one in reference.rounded]
    far = [(one[name] - exact[name]).norm().item() for one in samples]
    assert len(set(far)) == 3
    assert max(far) < 3 * min(far)  # of a tensor that is well-conditioned
    bounds = [
        Expected(exact, some).difference(name, exact[name])[1] for some in (samples[:1], samples)
    ]
    assert bounds[1] / bounds[0] == pytest.approx(max(max(far) / far[0], 1), rel=1e-3)


@ranks(3)
def test_ranks_share_the_samples_of_one_reference(world):
    case = make_case("dp3 mb1", batch=3)
    ours, alone = shared_reference(case, world), run_reference(case)
    assert (ours.noises, ours.drift) == (alone.noises, alone.drift)
    for one, other in zip(ours.rounded, alone.rounded, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(other.updates[name], x) for name, x in one.updates.items())


@ranks(1)
def test_ranks_keep_few_references(world):
    """Those of a whole table would fill the memory of a machine."""
    suite, case = Suite(world), replace(make_case("mb1", batch=1), steps=1)
    found = [suite._reference(case.from_seed(seed)) for seed in range(_KEPT + 1)]
    assert suite._reference(case.from_seed(1)) is found[1]
    suite._reference(case.from_seed(0))  # computed anew, in the place of the one used longest ago
    assert len(suite._references) == _KEPT
    assert suite._reference(case.from_seed(1)) is found[1]


def test_ties_of_experts_in_half_precision_have_more_samples():
    """A token near a tie takes one expert or another at each rounding."""
    case = next(c for c in matrix(2) if c.train.precision != "fp32" and c.model.experts == 4)
    train = case.train.model_copy(update={"batch": 2, "seq_len": 8})
    case = replace(case, train=train, steps=1, layout=Layout.parse("dp2 mb1"))
    some = replace(case, model=case.model.model_copy(update={"top_k": 2, "n_layers": 1}))
    every = replace(some, model=some.model.model_copy(update={"top_k": 4}))
    assert (some.samples, some.in_fp32.samples, every.samples) == (9, 3, 3)
    for one in (some, every):
        assert len(run_reference(one).rounded) == one.samples


def test_a_second_moment_of_noise_may_be_off_by_as_much_as_the_gradient():
    """Two samples of noise, one 12 times the other: their squares differ by a factor of 144."""
    size, ratio = 1e-6, 12.0
    moments = {"exact": 1e-12 * size**2, "rounded": size**2, "layout": (ratio * size) ** 2}
    exact, rounded, layout = (
        {"bias": comparable("exp_avg_sq", torch.full((80,), value)).float()}
        for value in moments.values()
    )
    error, bound = Expected(exact, [rounded]).difference("bias", layout["bias"])
    assert error <= bound
    error, bound = Expected(exact, [rounded]).difference("bias", 4 * layout["bias"])
    assert error > bound


def test_a_value_at_the_end_of_a_clamp_may_be_on_either_side(monkeypatch):
    """A layout rounds it another way: its whole part of the gradient is noise."""
    sizes = {**SIZES, "experts": 2, "top_k": 2, "head_dim": 8}
    case = Case(model_spec(family="gpt_oss", **sizes), TrainSpec(batch=1, seq_len=16), Layout())
    case, ups = replace(case, steps=1), list[torch.Tensor]()

    def recorded(model, gate, up):
        ups.append(up.detach().abs().flatten())
        return between(model, gate, up)

    between = _Model.between
    with monkeypatch.context() as patch:
        patch.setattr(_Model, "between", recorded)
        run_gradients(case, make_batch(case, 0))
    every = torch.cat(ups[-2:]).sort().values  # of the exact model
    widest = int(every.diff()[-200:].argmax()) + len(every) - 201
    value, beyond = every[widest], every[widest + 1]

    def noise(limit: float) -> float:
        model = case.model.model_copy(update={"swiglu_limit": limit})
        reference = run_reference(replace(case, model=model))
        return reference.noises[0]

    assert noise(value.item() * (1 + 5e-7)) > 100 * noise((value + beyond).item() / 2)
