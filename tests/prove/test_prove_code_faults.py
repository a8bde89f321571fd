"""Faults in the code of execution and training that a proof once passed: each must be caught.

A fault is a patch of one function, on every rank; a proof of a case then fails. In bf16, too, by
its own verdicts, without those of the same case in fp32.
"""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.groups import open_groups
from meshwright.layout import Layout
from meshwright.models import ops
from meshwright.parallel import loss
from meshwright.parallel.apply import Parallel
from meshwright.parallel.data_parallel.master_weights import Weight
from meshwright.parallel.tensor_parallel.tensor import together
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion
from meshwright.prove import compare, trial
from meshwright.prove.case import Case
from meshwright.prove.matrix import matrix
from meshwright.prove.parity import check, prove_parity
from meshwright.prove.reference import shared_reference
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from meshwright.training import update
from ranks import on_ranks

SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 96}


def no_clipping():
    real = update.step_scaled
    return patch.object(update, "step_scaled", lambda o, norm, scale, clip: real(o, norm, scale, 0))


def clipping_on_rank_0():
    real = update.step_scaled

    def some(optimizer, norm, scale, clip):
        real(optimizer, norm, scale, 0 if dist.get_rank() else clip)

    return patch.object(update, "step_scaled", some)


def last_row_not_updated():
    """The last row of the last rank's shards stays."""
    real = update.step_scaled

    def but_one(optimizer, norm, scale, clip):
        leaves = [one for group in optimizer.param_groups for one in group["params"]]
        before = [one.detach()[-1:].clone() for one in leaves]
        real(optimizer, norm, scale, clip)
        if dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                for one, row in zip(leaves, before, strict=True):
                    one[-1:] = row

    return patch.object(update, "step_scaled", but_one)


def rounded_masters():
    real = update.step_scaled

    def rounding(optimizer, norm, scale, clip):
        real(optimizer, norm, scale, clip)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for one in group["params"]:
                    one.copy_(one.bfloat16())

    return patch.object(update, "step_scaled", rounding)


def nothing_updated():
    return patch.object(update, "step_scaled", lambda *_: None)


def rounded_sums():
    """Gradients of microbatches are added up in bf16."""
    real = Weight.widen

    def narrow(self, dtype):
        real(self, dtype)
        if self._sum is not None:
            self._sum.copy_(self._sum.bfloat16())

    return patch.object(Weight, "widen", narrow)


def decayed_vectors():
    real = trial.build_optimizer

    def build(leaves, parts, spec, matrices=None):
        optimizer = real(leaves, parts, spec, matrices)
        for group in optimizer.param_groups:
            group["weight_decay"] = spec.weight_decay
        return optimizer

    return patch.object(trial, "build_optimizer", build)


def rate_of_one_group():
    def set_first(optimizer, rate):
        optimizer.param_groups[0]["lr"] = rate

    return patch.object(trial, "set_learning_rate", set_first)


def rows_of_rank_0():
    real = compare.share
    return patch.object(compare, "share", lambda batch, rank, ranks: real(batch, 0, ranks))


def doubled_evaluation():
    real = Parallel.evaluate

    def twice(self, batches):
        total, count = real(self, batches)
        return 2 * total, count

    return patch.object(Parallel, "evaluate", twice)


def dropout_in_evaluation():
    return patch.object(update, "set_training", lambda parallel, mode: None)


@contextmanager
def head_beyond_first_rows():
    """The head's weight has the gradient of the first rows of a microbatch alone."""
    chunks, at = loss._chunks, [0]

    def counting(tokens, each):
        for rows_ in chunks(tokens, each):
            at[0] = rows_.start
            yield rows_

    def muted(self, a, b, **_):
        return self if at[0] else real(self, a, b)

    real = torch.Tensor.addmm_
    with (
        patch.object(loss, "_chunks", counting),
        patch.object(torch.Tensor, "addmm_", muted),
    ):
        yield


def norm_backward():
    """RMSNorm's backward forgets that the scale depends on the input."""
    real = ops._RMSNorm.backward

    def without(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        _, of_weight, *rest = real(ctx, grad)
        return (grad.float() * weight * scale).to(x.dtype), of_weight, *rest

    return patch.object(ops._RMSNorm, "backward", staticmethod(without))


def rotation_backward():
    """The rotation's backward turns on instead of back."""

    def on(ctx, grad):
        return ops._turn(grad, *ctx.saved_tensors, 1.0), None, None

    return patch.object(ops._Rotate, "backward", staticmethod(on))


# Faults in a model.


def third_microbatch(parallel):
    """The third microbatch's gradient is lost."""
    forward, calls = parallel.forward, [0]

    def counting(stage, hidden, batch):
        out = forward(stage, hidden, batch)
        if stage == len(parallel.stage_ranks) - 1 and out.requires_grad:
            calls[0] += 1
            if calls[0] % parallel.program.microbatches == 3 % parallel.program.microbatches:
                out.register_hook(torch.zeros_like)
        return out

    parallel.forward = counting


def key_gradient(parallel):
    """The gradient of what the keys' projection takes is not summed over tp."""
    whole, own = (TPRegion(parallel.groups.tp, sp=False) for _ in range(2))
    own.returning = lambda grad: lambda: grad
    right, wrong = (together(tp_region, parallel.deferral) for tp_region in (whole, own))

    def project(x, layers, context):
        q, k, v = layers
        (found,) = wrong(x, (k,), context)
        of_q, of_v = right(x, (q, v), context)
        return of_q, found, of_v

    for module in parallel.modules.values():
        for block in module.layers.values():
            block.attn.project = project


def copies_counted_twice(parallel):
    """The norm counts what every tp rank holds once for each."""
    parallel.held[:] = [held._replace(copies=min(held.copies, 1)) for held in parallel.held]


def make(label, precision="fp32", batch=8, seq_len=16, **model):
    train = TrainSpec(batch=batch, seq_len=seq_len, precision=precision)
    return Case(model_spec(**{**SIZES, **model}), train, Layout.parse(label))


# Fault, layout, and what else is unusual about the case
LONG = {"batch": 10, "seq_len": 128}
CODE = {
    "no_clipping": ("dp2 mb2", {}),
    "clipping_on_rank_0": ("shard2 zero1 mb2", {}),
    "last_row_not_updated": ("shard2 zero2 mb2", {}),
    "nothing_updated": ("tp2 mb2", {}),
    "decayed_vectors": ("tp2 mb2", {}),
    "rate_of_one_group": ("dp2 mb2", {}),
    "rows_of_rank_0": ("dp2 mb2", {}),
    "doubled_evaluation": ("pp2 1f1b mb2", {}),
    "dropout_in_evaluation": ("dp2 mb2", {"dropout": 0.1}),
    "head_beyond_first_rows": ("dp2 mb5", LONG),
    "norm_backward": ("dp2 mb2", {}),
    "rotation_backward": ("tp2 mb2", {}),
}
MODEL = {
    "third_microbatch": ("dp2 mb1", {"batch": 6}),
    "key_gradient": ("tp2 mb2", {}),
    "copies_counted_twice": ("tp2 mb2", {}),
}
HALF = {"rounded_masters": ("dp2 mb2", {}), "rounded_sums": ("dp2 mb1", {"batch": 16})}


REFERENCES = {}  # by case, on each rank


def references(world):
    """Return the function of references, of which two ranks compute each one half, once."""

    def of(case):
        if case not in REFERENCES:
            REFERENCES[case] = shared_reference(case, world)
        return REFERENCES[case]

    return of


def verdicts_with(world, name, precision):
    label, unusual = {**CODE, **MODEL, **HALF}[name]
    return failed(world, name, make(label, precision, **unusual))


def failed(world, name, case):
    with ExitStack() as stack:
        fault = globals()[name]
        if name not in MODEL:
            stack.enter_context(fault())
            fault = None
        verdicts = check(
            case, open_groups(case.layout, world), world, references(world)(case), fault
        )
    return [verdict.claim for verdict in verdicts if not verdict.passed]


@pytest.mark.often(3)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*CODE, *MODEL])
def test_a_fault_is_caught(name, precision):
    assert on_ranks(2, verdicts_with, name=name, precision=precision)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
def test_what_is_to_stay_in_fp32_does(name):
    assert on_ranks(2, verdicts_with, name=name, precision="bf16")[0]


@pytest.mark.often(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("label", sorted({label for label, _ in CODE.values()}))
def test_without_a_fault_all_is_well(label, precision):
    assert on_ranks(2, healthy, label=label, precision=precision)[0] == []


def healthy(world, label, precision):
    case = make(label, precision, batch=10 if "mb5" in label else 8)
    verdicts = check(case, open_groups(case.layout, world), world, references(world)(case))
    return [verdict for verdict in verdicts if not verdict.passed]


def test_the_table_has_long_microbatches_and_large_tensors_in_every_world():
    for world in (2, 4, 8, 16):
        cases = [case for case in matrix(world) if case.refused is None]
        tokens = [case.layout.microbatch * case.train.seq_len for case in cases]
        counts = [c.layout.microbatches(c.train.batch) for c in cases]
        assert any(many > 512 and count >= 3 for many, count in zip(tokens, counts, strict=True))
        largest = [4 * case.model.vocab_size * case.model.dim for case in cases]
        assert any(
            size > 2**22 and case.layout.dp_shard > 1
            for size, case in zip(largest, cases, strict=True)
        )
        assert {case.optimizer.name for case in cases} >= {"adamw", "sgd"}


def place(world, name, label):
    case = make(label)
    with globals()[name]():
        verdicts = prove_parity(case, open_groups(case.layout, world), world, references(world))
    return [verdict.first_divergence for verdict in verdicts if not verdict.passed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label", "where"),
    [
        ("last_row_not_updated", "shard2 zero2 mb2", ("update", 1, 1)),
        ("clipping_on_rank_0", "shard2 zero1 mb2", ("update", 1, 1)),
        ("decayed_vectors", "tp2 mb2", ("update", 0, 1)),
    ],
)
def test_a_wrong_update_has_a_place(name, label, where):
    """Gradients are right: the update's tensor, the first rank that has it, and the step."""
    found = on_ranks(2, place, name=name, label=label)[0][0]
    assert (found.quantity, found.rank, found.step) == where
    assert found.tensor
