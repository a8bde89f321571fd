"""Muon: torch's own on whole matrices, and the same on shards."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from conformance_cases import make
from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.catalogue import cluster_of, find_device
from meshwright.cost.inputs import CostInputs, layers_of_ranks
from meshwright.cost.optimizer import matrix_seconds
from meshwright.cost.systems import SYSTEMS
from meshwright.program.lower import lower
from meshwright.program.update import matrix_gathers, update_flops
from meshwright.prove.optimizer import is_hidden_matrix
from meshwright.prove.suite import Suite
from meshwright.simulate.dry_run import dry_run
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import Part, parts
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer, step_scaled
from ranks import on_ranks
from saved_steps import MODEL, check_read_by

SHAPES = [(24, 16), (16, 24), (16, 16), (3, 40)]


def matrices(seed: int) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def stepped(optimizer, weights, steps: int, update) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        update(optimizer)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_whole_matrices_are_updated_as_torch_does(scale, nesterov):
    ours, theirs = matrices(0), matrices(0)
    spec = OptimizerSpec(
        name="muon", lr=0.02, momentum=0.9, nesterov=nesterov, scale=scale, weight_decay=0.1
    )
    parts = [Part(f"m{at}", shape, ("ffn", "dim")) for at, shape in enumerate(SHAPES)]
    norm = torch.tensor(1.0, dtype=torch.float64)
    stepped(
        build_optimizer(ours, parts, spec), ours, 4, lambda one: step_scaled(one, norm, 1.0, 0.0)
    )
    oracle = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale, weight_decay=0.1
    )
    stepped(oracle, theirs, 4, lambda one: one.step())
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


def test_a_batch_of_experts_is_as_many_matrices():
    torch.manual_seed(0)
    joined, apart = torch.randn(3, 24, 16), []
    batch = nn.Parameter(joined.clone())
    apart = [nn.Parameter(matrix.clone()) for matrix in joined]
    spec = OptimizerSpec(name="muon", lr=0.02, ns_precision="fp32")
    expert = Part("experts", (3, 24, 16), ("experts", "ffn", "dim"))
    alone = [Part(f"m{at}", (24, 16), ("ffn", "dim")) for at in range(3)]
    gradient = torch.randn_like(joined)
    batch.grad = gradient.clone()
    for weight, part in zip(apart, gradient, strict=True):
        weight.grad = part.clone()
    build_optimizer([batch], [expert], spec).step()
    build_optimizer(apart, alone, spec).step()
    torch.testing.assert_close(batch, torch.stack(list(apart)), rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_changes_nothing():
    weight = nn.Parameter(torch.randn(8, 4))
    optimizer = build_optimizer([weight], [Part("m", (8, 4), ("ffn", "dim"))], SPEC)
    weight.grad = torch.randn(8, 4)
    step_scaled(optimizer, torch.tensor(1.0, dtype=torch.float64), 1.0, 1.0)
    before, kept = weight.detach().clone(), optimizer.state[weight]["momentum_buffer"].clone()
    weight.grad = torch.full((8, 4), torch.inf)
    step_scaled(optimizer, torch.tensor(torch.inf, dtype=torch.float64), 1.0, 1.0)
    assert torch.equal(weight, before)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], kept)


def test_shards_are_refused_where_nothing_makes_them_whole():
    half = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"needs the whole of m, \(8, 4\)"):
        build_optimizer([half], [Part("m", (8, 4), ("ffn", "dim"))], SPEC)


@pytest.mark.parametrize("model", ["mixtral", "deepseek_v3", "neox", "olmo2", "qwen2_moe"])
def test_hidden_matrices_alone_are_orthogonalized(model):
    """By names, as the reference has it, and by axes, as the program has it."""
    for part in parts(make("mb1", model).model):
        by_axes = OPTIMIZERS["muon"].rule_of(part).needs_matrix
        assert by_axes == is_hidden_matrix(part.name, torch.empty(part.shape, device="meta"))


SPEC = OptimizerSpec(name="muon", warmup_steps=2, ns_precision="fp32")
FAST = [
    ("shard2 zero3 mb2", "llama"),
    ("tp2 sp mb2", "biased"),
    ("shard2 zero1 mb1 offload-optimizer", "tied"),
    ("shard2 zero2 ep2 mb2", "qwen2_moe"),
]
SLOW = [
    ("dp2 mb2", "tied"),
    ("cp2-ring mb2", "llama"),
    ("zero2 cp2-ulysses mb2", "qwen3"),
    ("shard2 zero3 mb1 offload-params", "llama"),
    ("dp2 shard2 zero3 mb1", "llama"),
    ("shard2 zero3 tp2 sp mb2", "biased"),
    ("shard2 zero1 tp2 mb2", "olmo2"),
    ("pp2 1f1b mb1", "tied"),
    ("pp2 zbv v2 mb1 shard2 zero1", "llama"),
    ("pp2 interleaved_1f1b v2 tp2 mb1", "neox"),
    ("tp2 mb2", "mixtral"),
    ("shard2 zero2 ep2 tp2 sp mb2", "qwen2_moe"),
    ("tp2 sp ep2 etp1 mb2", "qwen2_moe"),
    ("shard2 zero1 mb2", "deepseek_v3"),
    ("tp2 mb2", "gpt_oss"),
]


def muon(label, model, *more, **fields):
    return replace(make(label, model, *more), optimizer=SPEC, **fields)


PROVEN = [
    *(muon(*case) for case in FAST),
    *(pytest.param(muon(*case), marks=pytest.mark.slow) for case in SLOW),
    *(
        pytest.param(muon(label, "llama", *more, fsdp2=True), marks=pytest.mark.slow)
        for label, *more in (
            ("shard2 zero3 mb2",),
            ("shard2 zero1 mb1", "bf16"),
            ("zero3 tp2 sp mb2", "bf16"),
        )
    ),
    pytest.param(
        replace(muon("shard2 zero2 mb1", "llama", "bf16"), optimizer=OptimizerSpec(name="muon")),
        marks=pytest.mark.slow,
    ),
]


def proven(world, case):
    return Suite(world).prove(case)


@pytest.mark.often(1)
@pytest.mark.parametrize("case", PROVEN, ids=lambda case: case.label)
def test_layouts_update_as_one_device_does(case):
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "model"),
    [
        *FAST,
        ("dp2 shard2 zero3 tp2 sp pp2 1f1b mb1", "llama"),
        ("shard2 zero2 ep2 tp2 sp mb1", "qwen2_moe"),
        ("tp2 mb1", "mixtral"),
    ],
)
def test_a_dry_run_sends_and_computes_what_the_program_says(label, model):
    case = muon(label, model)
    program = lower(case.model, case.train, case.optimizer, case.layout)
    run = dry_run(program, case.layout.world - 1)
    assert run.messages == run.expected
    assert run.update > 0


class CountingKernels:
    """Prices a message at a second for each byte, or a product at one for each FLOP."""

    def __init__(self, *, counts_bytes: bool) -> None:
        self.network, self._counts_bytes = self, counts_bytes

    def seconds(self, kind, size, ranks, stride, axis):
        return size * (ranks > 1) * self._counts_bytes

    def product(self, shape, peak, element):
        return shape.flops * (not self._counts_bytes)


@pytest.mark.parametrize(
    ("label", "model"),
    [
        *FAST,
        *((label, model) for label, model in SLOW if "ulysses" not in label),
        ("dp2 shard2 zero3 tp2 sp mb1", "llama"),
    ],
)
def test_the_price_is_of_the_programs_messages_and_products(label, model):
    case = muon(label, model)
    layout = case.layout
    program = lower(case.model, case.train, case.optimizer, layout)
    cluster = cluster_of(find_device("h100-sxm"), layout.world)
    specs = case.model, case.train, case.optimizer
    setting = CostInputs(*specs, cluster, SYSTEMS["meshwright"], shipped_calibration(), "fp32")
    for place, held in enumerate(layers_of_ranks(setting, layout)):
        at = layout.mesh.coordinates(layout.mesh.rank({"pp": place}))
        sent = sum(message.bytes * message.count for message in matrix_gathers(program, at))
        computed = update_flops(program, at)
        for counts_bytes, expected in ((True, sent), (False, computed)):
            kernels = CountingKernels(counts_bytes=counts_bytes)
            priced = matrix_seconds(setting, kernels, layout, held)
            assert priced == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["shard2 zero1 mb1", "tp2 sp mb1", "pp2 1f1b mb1"])
def test_a_step_is_read_bit_for_bit_by_any_layout(label, tmp_path):
    others = ("mb1", "shard2 zero3 mb1")
    saved = check_read_by(others, label, SPEC, str(tmp_path), rtol=1e-2, atol=1e-4)
    momenta = {name for name in saved if name.startswith("momentum_buffer.")}
    assert len(momenta) == 7 * MODEL.n_layers
