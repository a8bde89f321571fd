"""`Case`: a layout to prove, with a small model, a batch and an optimizer. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from meshwright.layout import Layout
from meshwright.parsing import parse_json
from meshwright.spec.groups import GroupSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import OptimizerSpec, TrainSpec

# Those of the table and of random layouts.
ADAMW: Final = OptimizerSpec(name="adamw", warmup_steps=2)
SGD: Final = OptimizerSpec(name="sgd", momentum=0.5, warmup_steps=2)
GROUPED: Final = OptimizerSpec(
    warmup_steps=2,
    groups=(
        GroupSpec(match="layers.0.*", lr_scale=0.5),
        GroupSpec(match="*norm*", lr_scale=2.0, weight_decay=0.1),
        GroupSpec(match="embed.weight", weight_decay=0.0),
    ),
)


_SPECS: Final[Mapping[str, Any]] = {
    "model": ModelSpec,
    "train": TrainSpec,
    "layout": Layout,
    "optimizer": OptimizerSpec,
}
_SAMPLES, _SAMPLES_WITH_TIES = 3, 9
# A batch of so many tokens has ties in every run.
_MANY_TOKENS: Final = 1024


@dataclass(frozen=True)
class Case:
    """A layout to prove, with the small model and the training settings that it is proven with.

    `steps` training steps are compared with one device; both sides scale the optimizer's learning
    rate, `eps` and decay to the size of the gradients. `packed`: sequences hold several documents.
    `chat`: only some spans are trained, and half of the sequences have no target. `fsdp2`: FSDP2
    shards on CPUs, too, as it does on GPUs. `refused` is the rule that the layout is expected to
    break, None for a legal one.
    """

    model: ModelSpec
    train: TrainSpec
    layout: Layout
    packed: bool = False
    steps: int = 3
    optimizer: OptimizerSpec = ADAMW
    refused: str | None = None
    chat: bool = False
    fsdp2: bool = False

    @property
    def loss_scale(self) -> float:
        """The factor by which both sides multiply the loss, so that fp16 does not lose small
        gradients.
        """
        return 1024.0 if self.train.precision == "fp16" else 1.0

    @property
    def in_fp32(self) -> Case:
        """The same case with matmuls in fp32."""
        train = self.train.model_copy(update={"precision": "fp32", "fp8": False})
        return replace(self, train=train)

    @property
    def samples(self) -> int:
        """The number of runs on one device that measure the rounding noise.

        In half precision, rounding decides which expert a token near a tie selects. Of a few runs,
        none may select the one that a layout selects.
        """
        has_ties = self.train.precision != "fp32" and self.model.experts > self.model.top_k
        is_small = self.train.batch * self.train.seq_len < _MANY_TOKENS
        return _SAMPLES_WITH_TIES if has_ties and is_small else _SAMPLES

    def from_seed(self, seed: int) -> Case:
        """Return the same case with the weights and batches of another seed."""
        return replace(self, train=self.train.model_copy(update={"seed": seed}))

    @property
    def label(self) -> str:
        """The layout's label, then what is unusual about the model and the batch, such as "packed"
        or "bf16".
        """
        return f"{self.layout.label}, {' '.join(self._words())}"

    def _words(self) -> Iterator[str]:
        model = self.model
        yield model.family
        flags = {
            "tied": model.tie_embeddings,
            "biased": model.family != "neox" and model.attention_bias,
            "parallel": model.parallel_residual,
            "dropout": model.drops,
            f"lora {' '.join(sorted(model.adapted))}": model.lora is not None,
            "nf4": model.lora is not None and model.lora.is_nf4,
            "packed": self.packed,
            "chat": self.chat,
            "compiled": self.train.is_compiled,
            "fsdp2": self.fsdp2,
            f"{model.experts}x{model.top_k}": model.experts > 0,
            "aux": self.train.router_aux_loss > 0,
            "z": self.train.router_z_loss > 0,
            "bias": self.train.router_bias_rate > 0,
            "capacity": self.train.expert_capacity is not None,
        }
        yield from (name for name, is_set in flags.items() if is_set)
        yield f"{model.n_layers}L"
        yield f"{self.train.batch}x{self.train.seq_len}"
        if self.train.precision != "fp32":
            yield self.train.precision
        if self.train.fp8:
            yield "fp8"
        yield from self.optimizer_words

    @property
    def optimizer_words(self) -> tuple[str, ...]:
        """What differs from AdamW or SGD with masters and fp32 states, which the table deals in
        turn: such as "muon", "int8 states" or "no masters".
        """
        spec = self.optimizer
        differs = {
            spec.name: spec.name not in (ADAMW.name, SGD.name),
            f"{spec.state_dtype} states": spec.state_dtype != "fp32",
            "no masters": self.train.master == "none",
            "stochastic": spec.rounding == "stochastic",
        }
        return tuple(word for word, is_set in differs.items() if is_set)

    def as_json(self) -> str:
        """Return the case as a JSON object in one line, without default values."""
        values = {
            entry.name: value
            for entry in fields(self)
            if (value := getattr(self, entry.name)) != entry.default
        }
        for name in values.keys() & _SPECS.keys():
            values[name] = values[name].model_dump(mode="json", exclude_defaults=True)
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Return the case that `as_json` wrote."""
        values: Mapping[str, Any] = parse_json(text)
        specs = {
            name: spec.model_validate_json(json.dumps(values[name]))
            for name, spec in _SPECS.items()
            if name in values or name != "optimizer"
        }
        return cls(**{**values, **specs})
