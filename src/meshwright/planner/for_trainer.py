"""Plans for another training system: the layouts that it can run, priced as it runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from meshwright.cost.calibration import Calibration
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction
from meshwright.errors import ConfigError
from meshwright.interop.trainers import Trainer
from meshwright.layout import Layout
from meshwright.planner.plan import Plan, cost_inputs_of
from meshwright.planner.prices import KnownPrices
from meshwright.planner.rank import MARGIN, Found, Search, first_of_kinds
from meshwright.planner.space import given, words
from meshwright.spec.loading import Config
from meshwright.spec.training import LayoutSection

# Systems of the calibration that are another's, compiled.
_COMPILED: Final[Mapping[str, str]] = {"torchtitan": "torchtitan-compile"}


def priced_as(trainer: Trainer, config: Config) -> str:
    """Return the name of the system in `cost/systems.py` whose costs price the steps of a
    trainer."""
    if config.train.compile is True:
        return _COMPILED.get(trainer.priced_as, trainer.priced_as)
    return trainer.priced_as


def plan_for(
    config: Config,
    trainer: Trainer,
    top: int = 6,
    calibration: Calibration | None = None,
    margin: float = MARGIN,
) -> Plan:
    """Return a plan that ranks the layouts that a trainer can run, at most `top`; doesn't import
    torch.

    Layout keys that the config sets keep their values. Layouts leave the share `margin` of the
    memory free. Raises `ConfigError` if the trainer can run no legal layout.
    """
    setting = cost_inputs_of(config, calibration, system=priced_as(trainer, config))
    fixed, layers = given(config), config.model.n_layers
    spaces = trainer.pins(layers, fixed)
    prices, devices = KnownPrices(), setting.cluster.devices
    results = [
        Search(setting, devices, margin, pins, prices.of(setting, pins)).run(top) for pins in spaces
    ]
    merged = _merged(setting, results, top)
    if not merged.considered:
        wanted = f" with {words(fixed)}" if fixed else ""
        raise ConfigError(
            f"{trainer.name} {trainer.version} has no legal layout of {devices} devices{wanted} "
            f"and train.batch = {config.train.batch}; it has {_spaces(trainer)}"
        )
    return Plan(config, setting, merged, margin)


def _spaces(trainer: Trainer) -> str:
    return "; or ".join(space.why for space in trainer.spaces)


def _merged(setting: CostInputs, results: Sequence[Found], top: int) -> Found:
    """Merge the results of several searches: the `top` fastest kinds of layouts, and the counts
    added."""
    ranked: dict[Layout, Prediction] = {}
    reasons: Counter[str] = Counter()
    for result in results:
        reasons.update(result.reasons)
        ranked.update({prediction.layout: prediction for prediction in result.ranked})
    by_time = sorted(ranked.values(), key=lambda prediction: prediction.time.total)
    ordered = first_of_kinds(by_time)[:top]
    nearest = min(
        (result for result in results if result.unfit is not None),
        key=lambda result: result.unfit.total if result.unfit is not None else 0.0,
        default=None,
    )
    return Found(
        setting,
        tuple(ordered),
        sum(result.considered for result in results),
        dict(reasons.most_common()),
        None if ordered or nearest is None else nearest.unfit,
        None if ordered or nearest is None else nearest.unfit_layout,
    )


def freed(config: Config) -> Config:
    """Return the config without its layout keys, so that the planner chooses all of them."""
    layout = {key: "default" for key in config.origins if key.startswith("layout.")}
    origins = {**config.origins, **layout}
    return config.model_copy(update={"layout": LayoutSection(), "origins": origins})
