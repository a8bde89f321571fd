"""Loss curves of one small model on real text: optimizers, and what is kept in fewer bits.

    python -m benchmarks.optimizer_curves --steps 2000 --seeds 3 --out optimizer-curves.json

One process trains the package's model with the package's optimizers on Python's standard library,
bytes as tokens, and evaluates it on held-out files. All ways have the same batches, and all ways of
AdamW the same rate. Matmuls are in fp32 throughout, on weights rounded to bf16 where a way says so:
most CPUs have no matmuls in bf16. Runs of as many steps that the file of `--out` has are kept.
Prints the last held-out loss of each way: its mean and its range over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from meshwright.data.corpora import Stdlib
from meshwright.models import build_model, init_model
from meshwright.spec.learning_rate import learning_rate
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer, set_learning_rate, step_scaled


class Way(NamedTuple):
    """An optimizer, and the dtypes in which weights are kept and used."""

    optimizer: Mapping[str, Any]
    kept: torch.dtype = torch.float32
    used: torch.dtype = torch.float32


_ADAMW: Final[Mapping[str, Any]] = {"name": "adamw", "lr": 2e-3}
_STOCHASTIC: Final = {"rounding": "stochastic"}
_NARROW: Final = {**_ADAMW, "state_dtype": "bf16"}
_BF16: Final = torch.bfloat16
WAYS: Final[Mapping[str, Way]] = {
    "AdamW, fp32": Way(_ADAMW),
    "AdamW, bf16 with masters": Way(_ADAMW, used=_BF16),
    "AdamW, moments in bf16": Way(_NARROW),
    "AdamW, moments in bf16, stochastic": Way({**_NARROW, **_STOCHASTIC}),
    "AdamW, moments in int8": Way({**_ADAMW, "state_dtype": "int8"}),
    "AdamW, weights in bf16": Way(_ADAMW, _BF16, _BF16),
    "AdamW, weights in bf16, stochastic": Way({**_ADAMW, **_STOCHASTIC}, _BF16, _BF16),
    "AdamW, all in bf16, stochastic": Way({**_NARROW, **_STOCHASTIC}, _BF16, _BF16),
    "Muon, fp32": Way({"name": "muon", "lr": 2e-3, "ns_precision": "fp32"}),
    "Lion, fp32": Way({"name": "lion", "lr": 2e-4}),
}
_SEQ, _BATCH, _EVALUATED = 64, 4, 64
_MODEL: Final = {
    "vocab_size": 256,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 192,
}


@cache
def tokens() -> tuple[Tensor, Tensor]:
    """Return the bytes of the training text and of the held-out text, each int64 `[bytes]`."""
    source = Stdlib()
    texts = [text for part in source.parts() for text in source.documents(part)]
    sides = texts[: -len(texts) // 20], texts[-len(texts) // 20 :]
    train, held_out = (bytearray("\n".join(side).encode()) for side in sides)
    return tuple(torch.frombuffer(text, dtype=torch.uint8).long() for text in (train, held_out))


def sequences(text: Tensor, count: int, seed: int) -> Tensor:
    """Return `count` random pieces of a text with their targets, `[count, seq + 1]`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - _SEQ - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(_SEQ + 1)]


def losses(way: Way, steps: int, seed: int) -> list[tuple[int, float]]:
    """Return held-out losses of a run by step, in nats per byte."""
    text, held_out = tokens()
    spec = model_spec(**_MODEL)
    model = init_model(build_model(spec, device="cpu", max_seq_len=_SEQ), spec, seed)
    by_name = {
        name: nn.Parameter(weight.detach().to(way.kept))
        for name, weight in model.named_parameters()
    }
    for weight in by_name.values():
        weight.grad_dtype = torch.float32
    described = {part.name: part for part in parts(spec)}
    optimizer_spec = OptimizerSpec(warmup_steps=max(steps // 20, 1), **way.optimizer)
    optimizer = build_optimizer(
        list(by_name.values()), [described[name] for name in by_name], optimizer_spec
    )

    def loss_of(batch: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        logits = functional_call(model, dict(weights), (batch[:, :-1],))
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def used() -> dict[str, Tensor]:
        return {name: weight.detach().to(way.used).float() for name, weight in by_name.items()}

    curve = []
    evaluated = sequences(held_out, _EVALUATED, seed=2**31)
    for step in range(1, steps + 1):
        weights = {name: weight.requires_grad_() for name, weight in used().items()}
        loss = loss_of(sequences(text, _BATCH, seed * steps + step), weights)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for weight, gradient in zip(by_name.values(), gradients, strict=True):
            weight.grad = gradient
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm().double()
        set_learning_rate(optimizer, learning_rate(step, steps, optimizer_spec))
        step_scaled(optimizer, norm, 1.0, 1.0)
        if step % max(steps // 10, 1) == 0:
            with torch.no_grad():
                curve.append((step, loss_of(evaluated, used()).item()))
    return curve


def chosen(texts: Sequence[str]) -> list[str]:
    """Return the ways that texts name, or that contain a text which is no way's name."""
    return [name for name in WAYS if any(t == name or (t not in WAYS and t in name) for t in texts)]


def table(curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]]) -> str:
    """Return the last held-out losses as a table: the mean over seeds, and their range."""
    lines = ["| way | held-out loss | lowest | highest |", "|---|--:|--:|--:|"]
    for way, runs in curves.items():
        last = [run[-1][1] for run in runs]
        cells = (f"{value:.4f}" for value in (statistics.mean(last), min(last), max(last)))
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def processor() -> str:
    """Return the name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all ways with all seeds, print the table, and write the curves where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_curves")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="ways, or what names contain")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    curves: dict[str, list[list[tuple[int, float]]]] = {name: [] for name in WAYS}
    if args.out is not None and args.out.exists():
        curves |= json.loads(args.out.read_text())["curves"]
    ends = {run[-1][0] for runs in curves.values() for run in runs}
    if ends - {args.steps}:
        parser.error(f"{args.out} has runs of {max(ends)} steps; nearest: another file")
    ways = chosen(args.only)
    # A stopped run has all ways with as many seeds, or one more.
    for seed, name in product(range(args.seeds), ways):
        if len(curves[name]) > seed:
            continue
        started = time.process_time()
        curves[name].append(losses(WAYS[name], args.steps, seed))
        seconds = time.process_time() - started
        print(f"{name}, seed {seed}: {curves[name][-1][-1][1]:.4f}, {seconds:.0f} s", flush=True)
        if args.out is not None:
            content = {
                "command": f"python -m benchmarks.optimizer_curves --steps {args.steps}",
                "machine": f"{processor()}, torch {torch.__version__}",
                "model": {**_MODEL, "batch": _BATCH, "seq_len": _SEQ},
                "curves": {name: runs for name, runs in curves.items() if runs},
            }
            args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(table({name: runs for name, runs in curves.items() if runs}))


if __name__ == "__main__":
    main()
