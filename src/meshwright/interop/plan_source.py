"""`PlanSource`: the plan from which another trainer's config is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshwright.errors import ConfigError, refusal
from meshwright.interop.names import ModelNames, names_of
from meshwright.layout import Layout
from meshwright.spec.hub import folder_of, hub_id
from meshwright.spec.loading import Config
from meshwright.spec.optimizers import OPTIMIZERS

# Keys that steer Meshwright's own loop, or its predictions: no other trainer needs them.
OWN_KEYS: Final = frozenset(
    {
        *("train.log_every", "train.eval_every", "train.eval_batches", "train.stop_after_evals"),
        *("train.check_every", "train.nonfinite", "train.matmul", "train.engine"),
        *("train.imbalance", "train.routing", "train.loss_scale", "optimizer.schedule_steps"),
    }
)
# Sections whose keys a written config has, or is refused.
_WRITTEN: Final = ("train", "optimizer", "lora")
_UNSAID: Final = ("default", "plan")


@dataclass(frozen=True)
class PlanSource:
    """A config with its planned layout, the number of nodes and of devices per node."""

    config: Config
    layout: Layout
    nodes: int
    per_node: int

    @property
    def names(self) -> ModelNames:
        """The names of the model in other trainers; empty if they have none."""
        return names_of(self.config.model.preset)

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return self.nodes * self.per_node

    @property
    def accumulation(self) -> int:
        """The number of microbatches of a data-parallel rank in a step."""
        return self.layout.microbatches(self.config.train.batch)

    def is_stated(self, key: str) -> bool:
        """Return whether the user set a config key, in a file or on the command line."""
        origin = self.config.origins.get(key, "default")
        return origin not in _UNSAID and not origin.startswith("derived")

    def stated(self) -> list[str]:
        """Return the keys of training, optimizer and adapters that the user set."""
        return [
            key
            for key in self.config.origins
            if key.partition(".")[0] in _WRITTEN and self.is_stated(key)
        ]

    def value(self, key: str) -> Any:
        """Return the value of a config key such as `train.batch`."""
        section, _, name = key.partition(".")
        return getattr(getattr(self.config, section), name)

    def given(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the values that the user set, under another trainer's names.

        `names` maps Meshwright's keys to the trainer's.
        """
        return {name: self.value(ours) for ours, name in names.items() if self.is_stated(ours)}

    def optimizer_name(self, system: str) -> str:
        """Return a system's name for the optimizer; raises `ConfigError` if it has none."""
        optimizer = OPTIMIZERS[self.config.optimizer.name]
        if system not in optimizer.names:
            known = [other.name for other in OPTIMIZERS.values() if system in other.names]
            rule = f"{system} has no optimizer.name = {optimizer.name!r}"
            raise ConfigError(refusal(rule, legal=known))
        return optimizer.names[system][0]

    def hub_name(self) -> str:
        """Return the model's folder or hub repository; raises `ConfigError` if it has neither."""
        model = self.config.model
        if model.init_from is not None:
            identifier = hub_id(model.init_from)
            return model.init_from if identifier is None else identifier.repository
        name = self.names.hub[0] if self.names.hub else None
        if name is None:
            raise ConfigError(
                "the model has no name of the Hugging Face hub, and its sizes cannot be said in "
                "this config; nearest: model.init_from with the model's folder or Hub id"
            )
        return str(name)

    def check_named_model(self) -> None:
        """Raise `ConfigError` if the user set sizes, which the model's name does not express."""
        allowed = ("model.preset", "model.init_from", "model.context")
        extra = [
            key
            for key in self.config.origins
            if key.startswith("model.") and key not in allowed and self._is_size(key)
        ]
        if extra:
            listed = ", ".join(f"{key} = {self.value(key)!r}" for key in extra)
            raise ConfigError(f"the model is said by its name, which does not say {listed}")

    def _is_size(self, key: str) -> bool:
        origin, init_from = self.config.origins[key], self.config.model.init_from
        if init_from is not None and Path(origin).is_relative_to(folder_of(init_from)):
            return False
        names = ("default", "derived", "preset", "model.preset", "init_from", "import")
        return not origin.startswith(names) and origin != f"preset {self.config.model.preset}"
