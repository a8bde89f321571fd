"""What can be fine-tuned on some devices: all weights, adapters, or adapters on four bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction
from meshwright.planner.questions import longest_context
from meshwright.planner.rank import MARGIN, Search
from meshwright.spec.lora import Lora, check_targets, own_layers
from meshwright.spec.model import ModelSpec

# The rank of adapters where a config has none.
RANK: Final = 16


@dataclass(frozen=True)
class FineTuning:
    """One way to fine-tune: what is trained, and which layouts fit.

    `refused` says why the model cannot have adapters. `prediction` is the fastest layout at
    `train.seq_len`, `longest` the longest sequences and the fastest layout for them; None where
    nothing fits.
    """

    trained: str
    prediction: Prediction | None = None
    longest: tuple[int, Prediction] | None = None
    refused: str | None = None


def fine_tunings(setting: CostInputs, devices: int, margin: float = MARGIN) -> list[FineTuning]:
    """Return what training all weights, adapters, or adapters on NF4 takes on so many devices.

    Uses the model's adapters if it has some, otherwise adapters of rank `RANK` on every linear
    layer that can have a separate one.
    """
    model = setting.model
    lora = model.lora or Lora(rank=RANK, alpha=RANK, targets=_targets(model))
    name = f"adapters of rank {lora.rank}"
    ways: dict[str, Lora | None] = {
        "all weights": None,
        name: lora.model_copy(update={"base": "precision"}),
        f"{name}, 4-bit": lora.model_copy(update={"base": "nf4"}),
    }
    return [_way(setting, name, adapters, devices, margin) for name, adapters in ways.items()]


def _targets(model: ModelSpec) -> tuple[str, ...]:
    return tuple(own_layers(model.blocks))


def _way(
    setting: CostInputs, trained: str, lora: Lora | None, devices: int, margin: float
) -> FineTuning:
    model = setting.model
    try:
        check_targets(lora, model.blocks)
    except ValueError as error:
        return FineTuning(trained, refused=str(error))
    tuned_setting = replace(setting, model=model.model_copy(update={"lora": lora}))
    ranked = Search(tuned_setting, devices, margin).run(1).ranked
    return FineTuning(
        trained, ranked[0] if ranked else None, longest_context(tuned_setting, devices, margin)
    )
