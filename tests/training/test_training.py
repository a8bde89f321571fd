"""Training: any number of ranks computes what one computes, and the loop does what it says."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch

from meshwright.comm.groups import open_groups
from meshwright.layout import Layout
from meshwright.models import build_model
from meshwright.parallel.batch import Batch
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.gather import full_tensor
from meshwright.program.lower import lower
from meshwright.spec.families import FAMILIES
from meshwright.spec.learning_rate import learning_rate
from meshwright.spec.lora import Lora
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.loop import share
from meshwright.training.optimizer import build_optimizer, set_learning_rate
from meshwright.training.update import LossScale, evaluate, gradients, update
from ranks import on_ranks, ranks

SPECS = {
    "llama": {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128},
    "neox": {
        "family": "neox",
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "vocab_size": 128,
        "rotary_pct": 0.25,
        "parallel_residual": True,
    },
    "tied": {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 128, "tie_embeddings": True},
}
BATCH, SEQ = 8, 48


def global_batch(step: int, uneven: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 128, (BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if uneven:  # rows with very different numbers of targets: a mean of means would be wrong
        for row in range(BATCH):
            targets[row, : row * 5] = -100
    return Batch(tokens[:, :-1].contiguous(), targets, None)


def rows(batch: Batch, mine: range) -> Batch:
    return batch.rows(slice(mine.start, mine.stop))


def parallel_of(world, case, seed=7, precision="fp32", microbatch=1, compiled=False, **changes):
    spec = model_spec(**{**SPECS[case], **changes})
    layout = Layout(dp_replicate=world.size, microbatch=microbatch)
    train = TrainSpec(batch=BATCH, seq_len=SEQ, precision=precision)
    groups = open_groups(layout, world)
    program = lower(spec, train, OptimizerSpec(), layout)
    return build(program, groups, world.device, seeded(spec, seed), compiled=compiled)


def whole(parallel, tensor_of):
    return {h.name: full_tensor(tensor_of(h.parameter)).clone().numpy() for h in parallel.held}


def train_steps(world, case, steps, microbatch, precision="fp32", optimizer="sgd", clip_norm=1.0):
    """Losses, norms, final weights of a short run, first gradients, and the tokens seen."""
    mine = share(BATCH, world.rank, world.size)
    first = parallel_of(world, case, precision=precision, microbatch=microbatch)
    gradients(first, rows(global_batch(0), mine), world)
    found = {"loss": [], "norm": [], "seen": [], "grads": whole(first, lambda p: p.grad)}
    parallel = parallel_of(world, case, precision=precision, microbatch=microbatch)
    shards = Shards(parallel.held, on_host=False)
    chosen = OptimizerSpec(name=optimizer, lr=0.1 if optimizer == "sgd" else 1e-3)
    torch_optimizer = build_optimizer(shards.leaves, shards.parts, chosen)
    for step in range(steps):
        batch = rows(global_batch(step), mine)
        found["seen"].append(batch.inputs.tolist())
        done = update(parallel, batch, world, shards, torch_optimizer, LossScale(), clip_norm)
        found["norm"].append(done.norm.item())
        found["loss"].append(world.sum_on_host([done.loss.item()])[0])
    found["weights"] = whole(parallel, lambda p: p.detach())
    return found


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))


@pytest.mark.often(3)
@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize(
    ("world", "microbatch", "alone", "bound"),
    # A different cut adds the same numbers in another order: a little more rounding.
    [(2, 4, 4, 1e-6), (2, 1, 1, 1e-6), (4, 2, 2, 1e-6), (2, 1, BATCH, 2e-6), (4, 1, BATCH, 2e-6)],
)
def test_ranks_equal_one_rank(case, world, microbatch, alone, bound):
    one = on_ranks(1, train_steps, case=case, steps=3, microbatch=alone)[0]
    many = on_ranks(world, train_steps, case=case, steps=3, microbatch=microbatch)
    for rank in many:
        for name, expected in one["grads"].items():
            assert relative(rank["grads"][name], expected) < bound, name
        for name, expected in one["weights"].items():
            assert relative(rank["weights"][name], expected) < 1e-5, name
        assert rank["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-5)


def test_loss_curve_of_8_steps_and_the_same_tokens():
    runs = {n: on_ranks(n, train_steps, case="llama", steps=8, microbatch=2) for n in (1, 2, 4)}
    one = runs[1][0]
    for n in (2, 4):
        assert runs[n][0]["loss"] == pytest.approx(one["loss"], abs=1e-5)
        for step in range(8):
            together = [row for rank in runs[n] for row in rank["seen"][step]]
            assert together == one["seen"][step]


def test_one_device_equals_a_plain_torch_loop():
    """The reference itself is held against torch's own loss and optimizer, without our engine."""
    one = on_ranks(1, train_steps, case="llama", steps=3, microbatch=2, clip_norm=0.5)[0]
    from meshwright.models import build_model, init_model

    spec = model_spec(**SPECS["llama"])
    model = init_model(build_model(spec, device="cpu"), spec, 7)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    for step in range(3):
        batch = global_batch(step)
        loss = torch.nn.functional.cross_entropy(
            model(batch.inputs).flatten(0, 1), batch.targets.flatten(), ignore_index=-100
        )
        assert loss.item() == pytest.approx(one["loss"][step], abs=1e-5)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.item() == pytest.approx(one["norm"][step], rel=1e-5)
        with torch.no_grad():
            for p in decayed:
                p.mul_(1 - 0.1 * 0.1)
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
    for name, p in model.named_parameters():
        assert relative(one["weights"][name], p.detach().numpy()) < 1e-5, name


@pytest.mark.slow
def test_bf16_keeps_fp32_master_weights_and_follows_fp32():
    exact = on_ranks(2, train_steps, case="llama", steps=5, microbatch=2)[0]
    rounded = on_ranks(2, train_steps, case="llama", steps=5, microbatch=2, precision="bf16")[0]
    single = on_ranks(1, train_steps, case="llama", steps=5, microbatch=2, precision="bf16")[0]
    assert all(w.dtype == np.float32 for w in rounded["weights"].values())
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=5e-3)
    assert rounded["loss"] != exact["loss"]
    assert rounded["loss"] == pytest.approx(single["loss"], rel=1e-3)


@ranks(2)
def test_a_rank_without_targets_is_right(world):
    """All targets of one rank ignored: the loss is still the mean over the other's."""
    parallel = parallel_of(world, "llama")
    batch = rows(global_batch(0, uneven=False), share(BATCH, world.rank, 2))
    if world.rank == 1:
        batch.targets.fill_(-100)
    loss = world.sum_on_host([gradients(parallel, batch, world).loss.item()])[0]
    alone = evaluate(parallel, [batch], world)
    assert loss == pytest.approx(alone, abs=1e-5)
    assert loss == pytest.approx(math.log(128), abs=0.2)
    assert all(np.isfinite(g).all() for g in whole(parallel, lambda p: p.grad).values())


@ranks(2)
def test_evaluation_leaves_the_master_weights_in_place(world):
    parallel = parallel_of(world, "llama", precision="bf16")
    before = [held.shard.clone() for held in parallel.held]
    batches = [rows(global_batch(0), share(BATCH, world.rank, 2))]
    loss = evaluate(parallel, batches, world)
    after = [held.shard for held in parallel.held]
    assert all(t.dtype == torch.float32 for t in after)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    for shard in after:
        shard.mul_(0.5)
    assert abs(evaluate(parallel, batches, world) - loss) > 1e-4  # products took the new ones


@ranks(2)
def test_initial_weights_do_not_depend_on_the_mesh(world):
    spec = model_spec(**SPECS["neox"])
    digests = set()
    for precision in ("fp32", "bf16"):
        parallel = parallel_of(world, "neox", seed=3, precision=precision)
        joined = b"".join(w.tobytes() for w in whole(parallel, lambda p: p.detach()).values())
        digests.add(hashlib.sha256(joined).hexdigest())
    from meshwright.models import build_model, init_model

    plain = init_model(build_model(spec, device="cpu"), spec, 3)
    joined = b"".join(p.detach().numpy().tobytes() for p in plain.parameters())
    assert digests == {hashlib.sha256(joined).hexdigest()}


@pytest.mark.slow
@ranks(2)
def test_compiled_blocks_give_the_same_gradients(world):
    """On one rank: tests/models/test_models.py."""
    grads = []
    for compiled in (False, True):
        parallel = parallel_of(world, "llama", microbatch=2, compiled=compiled, n_layers=1)
        gradients(parallel, rows(global_batch(0), share(BATCH, world.rank, 2)), world)
        grads.append(whole(parallel, lambda p: p.grad))
    assert list(grads[0]) == list(grads[1])
    for name, expected in grads[0].items():
        assert relative(grads[1][name], expected) < 2e-6, name


# 100 steps, of which 10 warm up; steps count from 1.
SCHEDULES = {
    "cosine": [(1, 0.1), (10, 1.0), (55, 0.55), (100, 0.1)],
    "linear": [(5, 0.5), (10, 1.0), (55, 0.55), (100, 0.1)],
    "wsd": [(10, 1.0), (79, 1.0), (80, 1.0), (90, 0.55), (100, 0.1)],
    "constant": [(1, 0.1), (50, 1.0), (100, 1.0)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule):
    spec = OptimizerSpec(lr=1.0, schedule=schedule, warmup_steps=10, decay_steps=20)
    for step, expected in SCHEDULES[schedule]:
        assert learning_rate(step, 100, spec) == pytest.approx(expected), step


@pytest.mark.often(40)
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("low", [0.0, 0.1])
@pytest.mark.parametrize("steps", [1, 10, 1000])
@pytest.mark.parametrize("warmup", [0, 1, 9])
@pytest.mark.parametrize("decay", [None, 1, 5, 2000])
def test_the_last_step_has_the_lowest_rate(schedule, low, steps, warmup, decay):
    own = {"warmup_steps": min(warmup, steps - 1), "min_lr_ratio": low, "decay_steps": decay}
    spec = OptimizerSpec(lr=2.0, schedule=schedule, **own)
    rates = [learning_rate(step, steps, spec) for step in range(1, steps + 1)]
    assert rates[-1] == pytest.approx(2 * low, abs=1e-12)
    after = rates[own["warmup_steps"] :]
    assert after == sorted(after, reverse=True)
    if steps == 10 and schedule == "wsd":  # two of ten steps unless told
        full = {None: 8, 1: 9, 5: 5, 2000: 0}[decay]
        assert [rate == 2 for rate in after].count(True) == max(0, full - own["warmup_steps"])


def test_only_matrices_decay_and_the_rate_reaches_all_groups():
    spec = model_spec(family="llama", vocab_size=8, dim=4, n_layers=1, n_heads=1, ffn_dim=4)
    weights = dict(build_model(spec, "cpu").named_parameters())
    optimizer = build_optimizer(
        list(weights.values()), parts(spec), OptimizerSpec(weight_decay=0.3)
    )
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert [len(g["params"]) for g in optimizer.param_groups] == [9, 3]
    set_learning_rate(optimizer, 0.125)
    assert {g["lr"] for g in optimizer.param_groups} == {0.125}


UNDECAYED = (
    ".bias",
    ".sinks",
    "norm.weight",
    "_conv",
    "_conv.weight",
    ".a_log",
    ".dt_bias",
    ".skip",
)
ADAPTED = Lora(rank=2, alpha=2.0, targets=("*_proj",))


@pytest.mark.parametrize("lora", [None, ADAPTED], ids=["full", "adapters"])
@pytest.mark.parametrize("preset", [next(iter(one.presets)) for one in FAMILIES.values()])
def test_what_decays_is_a_matrix_by_its_meaning(preset, lora):
    """Biases of all experts have two dims, and are vectors: one for each expert."""
    spec = model_spec(preset=preset, n_layers=4).model_copy(update={"lora": lora})
    weights = dict(build_model(spec).named_parameters())
    settings = OptimizerSpec(name="sgd", weight_decay=0.3)
    groups = build_optimizer(list(weights.values()), parts(spec), settings).param_groups
    kept = {id(one) for group in groups if not group["weight_decay"] for one in group["params"]}
    assert [name for name, one in weights.items() if id(one) in kept] == [
        name for name in weights if name.endswith(UNDECAYED)
    ]


def test_events_with_infinite_numbers_stay_json(tmp_path):
    from meshwright.training.events import JsonLines

    sink = JsonLines(tmp_path / "events.jsonl")
    sink.write({"event": "step", "loss": float("nan"), "peak_memory_bytes": {"0": 1}})
    sink.close()
    line = (tmp_path / "events.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] == "nan"
