"""Twenty steps on conversations: a plain loop around a model of transformers, and a layout's.

The plain loop has one process, takes each conversation by itself, and knows nothing of our code but
which conversations a step has.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from meshwright.checkpoint.adapters import AdapterSource, both
from meshwright.checkpoint.weights import weights_from
from meshwright.comm.groups import open_groups
from meshwright.data import IGNORE, open_data
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.layout import Layout
from meshwright.parallel.batch import Batch
from meshwright.parallel.build import build
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.gather import on_stages
from meshwright.program.lower import lower
from meshwright.prove.compare import mine
from meshwright.spec.training import DataSpec, OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update

CHAT = Path(__file__).parent.parent / "examples" / "chat"
STEPS = 10
TRAIN = TrainSpec(batch=8, seq_len=256, seed=3, clip_norm=1.0)
OPTIMIZER = OptimizerSpec(lr=3e-4, weight_decay=0.1, schedule="constant", warmup_steps=0)
DATA = DataSpec(
    source=str(CHAT / "conversations.jsonl"),
    tokenizer=str(CHAT / "tokenizer"),
    format="chat",
    packing="documents",
    validation=0.0,
)


class Steps(NamedTuple):
    """Losses and norms of the steps, and the gradients of the first and the last, unclipped."""

    losses: list[float]
    norms: list[float]
    first: dict[str, np.ndarray]
    last: dict[str, np.ndarray]


def labelled():
    """Return ids and labels of each conversation as transformers makes them, by its ids.

    The last conversation of a row has its last token as a target alone.
    """
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(str(CHAT / "tokenizer")), {}
    for line in (CHAT / "conversations.jsonl").read_text().splitlines():
        made = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        ids, mask = made["input_ids"], made["assistant_masks"]
        labels = [i if marked else IGNORE for i, marked in zip(ids, mask, strict=True)]
        found[tuple(ids)] = found[tuple(ids[:-1])] = (ids, labels)
    return found


def conversations(rows, labels):
    """Return the conversations in rows of a batch: ids and labels, padded to the longest."""
    found = []
    for inputs, of in zip(rows.inputs, rows.segments, strict=True):
        for number in range(of.max() + 1):
            key = tuple(inputs[of == number].tolist())
            if key in labels:
                found.append(labels[key])
            else:  # what fills a row
                assert not any(key)
    ids, marked = zip(*found, strict=True)

    def pad(sequences, value):
        tensors = [torch.tensor(one) for one in sequences]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    return pad(ids, 0), pad(marked, IGNORE)


def plain_steps(model, sampler, optimizer=OPTIMIZER, clip=TRAIN.clip_norm):
    """Take the steps with transformers' model and torch's AdamW, clipping (0: not) and sums."""
    labels = labelled()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    groups = [
        {"params": [one for one in trained.values() if one.dim() >= 2]},
        {"params": [one for one in trained.values() if one.dim() < 2], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(
        groups,
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    losses, norms, kept = [], [], []
    for step in range(STEPS):
        ids, marked = conversations(sampler.rows(step), labels)
        # Nothing attends to what fills a conversation up: it comes last.
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, marked[:, 1:].flatten(), ignore_index=IGNORE)
        made.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if step in (0, STEPS - 1):
            kept.append({name: one.grad.numpy().copy() for name, one in trained.items()})
        most = clip or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), most).item())
        made.step()
    return Steps(losses, norms, *kept)


def sampled(folder):
    """Return the sampler of the rows that both loops take."""
    return open_data(DATA, folder / "cache").sampler("train", TRAIN.seq_len, TRAIN.batch)


def own_steps(world, label, spec, folder):
    """Take the steps on a layout, from the weights and adapters in a folder."""
    layout = Layout.parse(label)
    program = lower(
        spec, TRAIN, OptimizerSpec(), layout, target_of(TRAIN, world.device, packed=True)
    )
    source = weights_from(folder / "base", spec)
    if spec.lora is not None:
        source = both(source, AdapterSource(folder / "adapter", spec))
    parallel = build(program, open_groups(layout, world), world.device, source)
    shards = Shards(parallel.trained, on_host=layout.offload == "optimizer")
    optimizer, sampler = build_optimizer(shards.leaves, shards.parts, OPTIMIZER), sampled(folder)
    losses, norms, kept = [], [], []

    def keep():
        whole = on_stages(parallel, lambda held: held.parameter.grad)
        kept.append({held.name: gradient.cpu().numpy().copy() for held, gradient in whole})

    for step in range(STEPS):
        rows = mine(Batch.of(sampler.rows(step)), program, world)
        look = keep if step in (0, STEPS - 1) else lambda: None
        scale = LossScale.of(TRAIN)
        done = update(parallel, rows, world, shards, optimizer, scale, TRAIN.clip_norm, look)
        losses.append(world.sum_on_host([done.loss.item()])[0])
        norms.append(done.norm.item())
    return Steps(losses, norms, *kept)


class Worst(NamedTuple):
    """The largest differences of two loops.

    Of losses in nats; of norms relative to them; of a gradient over the largest element that it
    has, as of one tensor.
    """

    loss: float
    norm: float
    first: float
    last: float


def worst(ranks, expected, renamed):
    """Return how far the loops of all ranks are from another; `renamed` gives its names of ours."""
    return Worst(
        max(abs(a - b) for one in ranks for a, b in zip(one.losses, expected.losses, strict=True)),
        max(
            abs(a / b - 1) for one in ranks for a, b in zip(one.norms, expected.norms, strict=True)
        ),
        _furthest([one.first for one in ranks], expected.first, renamed),
        _furthest([one.last for one in ranks], expected.last, renamed),
    )


def _furthest(ranks, expected, renamed):
    found = [(renamed(name), gradient) for one in ranks for name, gradient in one.items()]
    assert {name for name, _ in found} == expected.keys()
    return max(
        float(abs(gradient - expected[name]).max() / abs(expected[name]).max())
        for name, gradient in found
    )
