"""Alarms without a reference: numbers that tell copies apart, and what they say of all ranks."""

import importlib

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from meshwright.prove.trainers.alarms import CopyGroups, random_signs, signed_sum
from meshwright.prove.trainers.gather import ModelReader
from meshwright.prove.trainers.watch import watch
from meshwright.units import format_bytes
from ranks import on_ranks, ranks
from trainer_loops import Tiny, build, loss_of, rows, train

SIGNS = random_signs(4096)
FIRST_MICROBATCH = (["inputs", "0"], ["outputs", "0"])


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("size", [1000, 10**6, 3 * 10**6 + 1, 2 * 4096**2])
def test_gradients_that_differ_a_little_have_other_sums(size):
    """However many elements: a sum with weights of one sign hides what adds up to nothing."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(size, generator=generator)
    other = gradient + 0.1 * torch.randn(size, generator=generator)
    sums = [signed_sum(values, SIGNS) for values in (gradient, other)]
    assert signed_sum(gradient.clone(), SIGNS) == sums[0]
    assert abs(sums[1] - sums[0]) > 1e-4 * gradient.norm()


@pytest.mark.parametrize("size", [1, 5, 4095, 4096, 4097, 3 * 4096 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_counts_once(size, dtype):
    for place in {0, size // 2, size - 1}:
        gradient = torch.zeros(size, dtype=dtype)
        gradient[place] = 3
        assert abs(signed_sum(gradient, SIGNS)) == 3


def of_two_ranks(*pairs):
    """Return [rank, parameter, (norm, sum)] of two ranks."""
    return torch.tensor(pairs, dtype=torch.float32).transpose(0, 1)


def test_what_is_wrong_is_named():
    known = [("copied", (4,), 1e-4), ("sharded", (0, 4), 1e-4), ("other", (2,), 1e-4)]
    other = [("copied", (4,), 1e-4), ("sharded", (1, 4), 1e-4), ("other", (2,), 1e-4)]
    groups = CopyGroups([known, other])
    absent, inf = (-1.0, -1.0), float("inf")
    right = [((2.0, 1.0), (2.0, 1.0)), ((1.0, 1.0), (3.0, -2.0)), ((1.0, 1.0), (1.0, 1.00001))]
    assert groups.alarms(of_two_ranks(*right)) == []
    apart = [((2.0, 1.0), (2.0, 1.1)), *right[1:]]
    assert [a[:30] for a in groups.alarms(of_two_ranks(*apart))] == [
        "the gradient of copied differs"
    ]
    infinite = [((inf, inf), (2.0, 1.0)), *right[1:]]
    assert groups.alarms(of_two_ranks(*infinite)) == ["the gradient of copied is not finite"]
    one_absent = [(absent, (2.0, 1.0)), (absent, absent), right[2]]
    assert groups.alarms(of_two_ranks(*one_absent)) == ["sharded has no gradient on any rank"]
    nothing = [(absent, absent)] * 3
    assert groups.alarms(of_two_ranks(*nothing)) == ["no parameter has a gradient"]
    zeros = [((0.0, 0.0), (0.0, 0.0))] * 3
    assert groups.alarms(of_two_ranks(*zeros)) == ["all gradients are zero: nothing trains"]


def test_ranks_may_hold_other_parameters():
    """A pipeline's stages: the copies of each are compared, and no other's."""
    groups = CopyGroups([[("a", (4,), 1e-4)], [("b", (4,), 1e-4), ("c", (4,), 1e-4)]])
    numbers = torch.tensor([[[1.0, 1.0], [-1.0, -1.0]], [[2.0, 2.0], [3.0, 3.0]]])
    assert groups.alarms(numbers) == []


@ranks(2)
def test_steps_of_optimizers_of_other_models_are_not_checked(world):
    """Not before the model has gradients, and not by what the other's ranks do."""
    first, second = build("ddp")[0], nn.Linear(4, 4)
    own, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second))
    lines = []
    with watch(first, check="replicas", say=lines.append) as watched:
        second(torch.ones(2, 4) * dist.get_rank()).sum().backward()
        torch.nn.utils.clip_grad_norm_(second.parameters(), 1.0)
        other.step()
        assert watched.checked == 0
        accumulate(first)
        own.step()
        assert watched.checked == 1
        second.weight.grad = None
        other.step()
    assert (watched.alarms, lines, watched.checked) == ([], [], 1), (watched.alarms, lines)


@ranks(2)
def test_an_optimizer_of_some_parameters_is_checked_for_these(world):
    """The others have their gradients at other times; what is missing of its own is said."""
    model = build("ddp")[0]
    names = dict(model.module.named_parameters())
    head = [p for name, p in names.items() if name.startswith("head")]
    rest = [p for name, p in names.items() if not name.startswith("head")]
    of_head, of_rest = torch.optim.SGD(head, lr=0.1), torch.optim.SGD(rest, lr=0.1)
    with watch(model, check="replicas", say=lambda line: None) as watched:
        accumulate(model)
        of_head.step()
        of_head.zero_grad()
        of_rest.step()
        assert watched.alarms == []
        of_rest.zero_grad()
        accumulate(model)
        names["norm.weight"].grad = None
        of_head.step()
        assert watched.alarms == []
        of_rest.step()
    assert watched.alarms == ["norm.weight has no gradient on any rank"]


class FlatOptimizer:
    """What DeepSpeed's ZeRO does: the base optimizer steps a flat copy of a rank's share."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        size = sum(p.numel() for p in self.parameters)
        self.flat = nn.Parameter(torch.zeros(size))
        self.base = torch.optim.AdamW([self.flat], lr=0.1)

    def step(self):
        gradients = [p.grad.flatten() for p in self.parameters]
        self.flat.grad = torch.cat(gradients) * (1 + dist.get_rank())
        for p in self.parameters:
            p.grad = None
        self.base.step()


@ranks(2)
def test_an_optimizer_of_flat_buffers_is_not_checked_and_that_is_said(world):
    model = build("ddp")[0]
    optimizer, lines = FlatOptimizer(model), []
    with watch(model, check="replicas", say=lines.append) as watched:
        accumulate(model)
        optimizer.step()
    assert (watched.alarms, watched.checked) == ([], 0)
    assert [line.startswith("no step was checked") for line in lines] == [True] * (
        dist.get_rank() == 0
    )


@ranks(2)
def test_each_rank_may_update_a_share(world):
    """What any rank's optimizer holds is checked on all; an optimizer inside counts once."""
    model = Tiny()
    share = list(model.parameters())[dist.get_rank() :: 2]
    optimizer = torch.optim.SGD(share, lr=0.1)
    with watch(model, check="replicas", say=lambda line: None) as watched:
        accumulate(model)
        optimizer.step()
    assert len(watched.alarms) == 1
    assert "differs between ranks" in watched.alarms[0]
    sharded = build("ddp")[0]
    outer = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.AdamW, lr=0.1)
    with watch(sharded, check="replicas", say=lambda line: None) as watched:
        accumulate(sharded)
        outer.step()
    assert (watched.alarms, watched.checked) == ([], 1)


def accumulate(model):
    ids, targets = rows(0, 0, dist.get_rank())
    loss_of(model(ids), targets, 10).backward()


def told_and_size(world, engine, folder):
    """Return what `watch` says, the size that its reader finds, and the whole model's."""
    model, data_ranks, data_rank = build(engine)
    lines = []
    reference = Tiny if engine == "tp" else None
    with watch(model, folder=folder, say=lines.append, reference=reference):
        train(model, data_ranks, data_rank)
    whole = sum(p.numel() * p.element_size() for p in Tiny().parameters())
    return lines, ModelReader(model).whole_bytes(), whole


@pytest.mark.often(1)
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "tp"])
def test_memory_is_told_for_the_whole_model_before_it_is_taken(engine, tmp_path):
    lines, size, whole = on_ranks(2, told_and_size, engine=engine, folder=tmp_path)[0]
    assert whole <= size < 1.01 * whole
    assert "meshwright records 2 steps" in lines[0]
    kept = {rank: load_file(tmp_path / f"step-1/rank-{rank}.safetensors") for rank in (0, 1)}
    first = [t for key, t in kept[0].items() if key.split("|")[:2] in FIRST_MICROBATCH]
    assert f"each microbatch adds {format_bytes(bytes_of(first))}" in lines[1]
    is_of_rows = ("inputs|", "outputs|")
    of_model = [
        tensor
        for by_key in kept.values()
        for key, tensor in by_key.items()
        if not key.startswith(is_of_rows)
    ]
    assert bytes_of(of_model) <= 4 * whole


@ranks(2)
def test_finished_watches_leave_nothing_behind(world, tmp_path):
    """No hook on the model or in torch: a step afterwards costs what it did before."""
    hooks = importlib.import_module("torch.optim.optimizer")
    places = (hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks)
    functions = (torch.nn.utils.clip_grad_norm_, torch.nn.Module.__call__)
    steppers = (torch.amp.GradScaler.step, torch.nn.utils.clip_grad.clip_grad_norm_)
    for check in ("reference", "replicas"):
        model, data_ranks, data_rank = build("ddp")
        with watch(model, folder=tmp_path / check, say=lambda line: None, check=check):
            train(model, data_ranks, data_rank)
        assert [len(place) for place in places] == [0, 0]
        assert functions == (torch.nn.utils.clip_grad_norm_, torch.nn.Module.__call__)
        assert steppers == (torch.amp.GradScaler.step, torch.nn.utils.clip_grad.clip_grad_norm_)
        for module in model.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
