"""Records of a training step: what each rank writes to files, and rank 0 reads.

A folder has `step-N/rank-R.safetensors` and `.json`. If several ranks have a whole tensor with the
same bits, the first of them writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError
from meshwright.prove.trainers.gather import digest, shared_copies
from meshwright.prove.trainers.observed import GatheredTensor, RankCopy

_PLAIN: Final = (bool, int, float, str, type(None))


@dataclass
class RecordedMicrobatch:
    """The inputs of one forward of the model, and its outputs with the gradients that they
    received.

    `inputs` is JSON, in which each tensor is replaced by its key in `tensors`. Outputs are
    numbered; `values` has a number for each, see `summary_of`.
    """

    inputs: Any
    tensors: dict[str, Tensor]
    values: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A digest of the inputs, which is equal on the ranks that share a model replica."""
        texts = [json.dumps(self.inputs, sort_keys=True)]
        texts += [f"{name} {digest(tensor)}" for name, tensor in sorted(self.tensors.items())]
        return " ".join(texts)


@dataclass
class Clip:
    """A call that clipped gradients: the norm, its limit, and the names of the parameters that the
    norm counts.

    `names` is None for all parameters; `others` is the number of parameters of other models.
    """

    norm: float
    max_norm: float
    names: list[str] | None = None
    others: int = 0

    def factor(self, name: str) -> float:
        """Return the factor by which this call multiplied a parameter's gradient."""
        if self.names is not None and name not in self.names:
            return 1.0
        return min(1.0, self.max_norm / (self.norm + 1e-6))


@dataclass
class RecordedStep:
    """One rank's record of a training step.

    The gradients that outputs received include the factor `loss_scale`. `groups` are the
    optimizers' parameter groups. `is_touched`: the weights changed between the optimizer's step and
    the next forward, so that `after` includes that.
    """

    microbatches: list[RecordedMicrobatch] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] | None = None
    after: dict[str, Tensor] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    loss_scale: float = 1.0
    is_touched: bool = False


@dataclass
class LoadedStep:
    """A recorded step of all ranks; `microbatches` and `clips` are lists by rank."""

    microbatches: list[list[RecordedMicrobatch]]
    weights: dict[str, GatheredTensor]
    gradients: dict[str, GatheredTensor]
    after: dict[str, GatheredTensor]
    clips: list[list[Clip]]
    groups: list[dict[str, Any]]
    is_touched: bool

    @property
    def norms(self) -> dict[int, float]:
        """The norm by which each rank clipped; empty unless each clipped once, and the norm counts
        this model alone.
        """
        is_one = all(len(clips) == 1 and not clips[0].others for clips in self.clips)
        return {rank: clips[0].norm for rank, clips in enumerate(self.clips)} if is_one else {}


def encode(value: Any, tensors: dict[str, Tensor], path: str = "input") -> Any:
    """Convert nested values to JSON, and move their tensors to `tensors`, by a path such as
    "input.0.x".

    Raises `ConfigError` for values of other types than tensors, numbers, strings, lists, tuples and
    dicts.
    """
    if isinstance(value, Tensor):
        if isinstance(value, DTensor):
            value = value.full_tensor()
        tensors[path] = value.detach().cpu().clone()
        return {"tensor": path}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {"dict": {str(k): encode(v, tensors, f"{path}.{k}") for k, v in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(v, tensors, f"{path}.{n}") for n, v in enumerate(value)]}
    raise ConfigError(
        f"{path} of the model is a {type(value).__name__}, which cannot be recorded; only tensors, "
        "numbers, texts, lists and dicts can"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the nested values that `encode` converted."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {k: decode(v, tensors) for k, v in inner.items()}
    items = [decode(v, tensors) for v in inner]
    return items if kind == "list" else tuple(items)


def summary_of(output: Tensor) -> float:
    """Return the number of a scalar output; of another output, a number that depends on each
    element.
    """
    flat = output.detach().flatten().double()
    if flat.numel() == 1:
        return float(flat)
    places = torch.arange(flat.numel(), dtype=torch.float64, device=flat.device)
    return float((flat + flat.norm() * flat.numel() ** -0.5 * torch.cos(places)).norm())


def write_step(
    folder: Path, number: int, step: RecordedStep, sharded: Mapping[str, tuple[str, ...]], rank: int
) -> None:
    """Write this rank's files of step `number`; a collective.

    `sharded` has the names of the mesh axes that shard each parameter.
    """
    tensors, holders = dict[str, Tensor](), dict[str, dict[str, list[list[int]]]]()
    kinds: dict[str, Mapping[str, Tensor | None]]
    kinds = {"weights": step.weights, "gradients": step.gradients or {}, "after": step.after}
    for kind, values in kinds.items():
        holders[kind] = {}
        for name, by_digest in shared_copies(values).items():
            groups = list(by_digest.values())
            holders[kind][name] = groups
            value = values.get(name)
            if value is not None and any(group[0] == rank for group in groups):
                tensors[f"{kind}|{name}"] = value.contiguous()
    microbatches = []
    for place, microbatch in enumerate(step.microbatches):
        for name, tensor in microbatch.tensors.items():
            tensors[f"inputs|{place}|{name}"] = tensor.contiguous().clone()
        for output, gradient in microbatch.gradients.items():
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            full = full / step.loss_scale
            tensors[f"outputs|{place}|{output}"] = full.detach().cpu().contiguous().clone()
        microbatches.append({"inputs": microbatch.inputs, "values": microbatch.values})
    facts = {
        "microbatches": microbatches,
        "holders": holders,
        "sharded": sharded,
        "clips": [vars(clip) for clip in step.clips],
        "groups": step.groups,
        "is_touched": step.is_touched,
    }
    place_of_step = folder / f"step-{number}"
    place_of_step.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place_of_step / f"rank-{rank}.safetensors")
    (place_of_step / f"rank-{rank}.json").write_text(json.dumps(facts))


def load_step(folder: Path, number: int, ranks: int) -> LoadedStep:
    """Read the files of step `number` of all `ranks` ranks."""
    place = folder / f"step-{number}"
    tensors = [load_file(place / f"rank-{rank}.safetensors") for rank in range(ranks)]
    facts = [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    gathered = {
        kind: _gathered(kind, facts[0]["holders"][kind], tensors, facts[0]["sharded"])
        for kind in ("weights", "gradients", "after")
    }
    return LoadedStep(
        [_microbatches(facts[rank], tensors[rank]) for rank in range(ranks)],
        gathered["weights"],
        gathered["gradients"],
        gathered["after"],
        [[Clip(**clip) for clip in fact["clips"]] for fact in facts],
        _groups_of([fact["groups"] for fact in facts]),
        any(fact["is_touched"] for fact in facts),
    )


def _groups_of(by_rank: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the optimizers' parameter groups of all ranks, with each parameter in one group."""
    groups = [dict(group) for group in by_rank[0]]
    known = {name for group in groups for name in group["names"]}
    for rank_groups in by_rank[1:]:
        for place, group in enumerate(rank_groups):
            names = [name for name in group["names"] if name not in known]
            known.update(names)
            same = groups[place : place + 1]
            if same and {**same[0], "names": ()} == {**group, "names": ()}:
                same[0]["names"] = [*same[0]["names"], *names]
            elif names:
                groups.append({**group, "names": names})
    return groups


def _gathered(
    kind: str,
    holders: Mapping[str, Sequence[Sequence[int]]],
    tensors: Sequence[Mapping[str, Tensor]],
    sharded: Mapping[str, Sequence[str]],
) -> dict[str, GatheredTensor]:
    return {
        name: GatheredTensor(
            tuple(
                RankCopy(tuple(ranks), tensors[ranks[0]].get(f"{kind}|{name}")) for ranks in groups
            ),
            tuple(sharded.get(name, ())),
        )
        for name, groups in holders.items()
    }


def _microbatches(facts: Any, tensors: Mapping[str, Tensor]) -> list[RecordedMicrobatch]:
    microbatches = []
    for place, microbatch in enumerate(facts["microbatches"]):
        parts: dict[str, dict[str, Tensor]] = {
            kind: {
                key.split("|", 2)[2]: tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{kind}|{place}|")
            }
            for kind in ("inputs", "outputs")
        }
        values = {int(k): v for k, v in microbatch["values"].items()}
        gradients = {int(k): v for k, v in parts["outputs"].items()}
        microbatches.append(
            RecordedMicrobatch(microbatch["inputs"], parts["inputs"], values, gradients)
        )
    return microbatches
