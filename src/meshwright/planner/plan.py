"""`plan`: from a config to ranked layouts, with explanations and the command to train the best."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from meshwright.cost.calibration import Calibration, calibration_named
from meshwright.cost.catalogue import Device, resolve_cluster, slowed
from meshwright.cost.evidence import evidence
from meshwright.cost.inputs import CostInputs, as_measured, imbalance_of
from meshwright.cost.price import Prediction, price
from meshwright.cost.systems import SYSTEMS
from meshwright.errors import ConfigError, refusal
from meshwright.layout import Layout, broken
from meshwright.layout.rules import nearest_legal
from meshwright.planner import questions
from meshwright.planner.advice import lost_by, warnings
from meshwright.planner.choices import (
    NOTHING_FITS,
    Chosen,
    CompileChoice,
    choices,
    choose,
    decided,
    with_compile,
)
from meshwright.planner.prices import KnownPrices
from meshwright.planner.questions import FineTuning, LargestBatch, Offer, fine_tunings, on_devices
from meshwright.planner.rank import MARGIN, Found, Search, uncollected
from meshwright.planner.space import RemovedAxis, given, is_given, refuse, removed_axes, words
from meshwright.program.target import Processor
from meshwright.spec.dump import portable
from meshwright.spec.loading import Config
from meshwright.spec.model import ModelSpec, padded
from meshwright.spec.parts import parameter_count
from meshwright.spec.training import LayoutSection, TrainSpec
from meshwright.tables import html_table, text_table
from meshwright.units import format_bytes, format_count, format_seconds

# Devices of a machine that says nothing else: the ranks that a CPU is split into.
_LOCAL_DEVICES = 2


# What a run reads, of which a saved plan keeps whether anybody has named it.
OF_DATA: Final = ("data.source", "data.tokenizer")
COLUMNS: Final = ("layout", "memory", "step", "tokens/s", "MFU", "why not")


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan`: the ranked layouts of a config, best first; `as_json` has all contents.

    `found` is the result of the search, `margin` the share of memory that layouts leave free.
    Prints as a short table, also in a notebook.
    """

    config: Config
    setting: CostInputs
    found: Found
    margin: float = MARGIN
    compile: CompileChoice = NOTHING_FITS

    @property
    def best(self) -> Prediction | None:
        """The prediction of the layout to run, or None if no layout fits."""
        return self.found.ranked[0] if self.found.ranked else None

    @property
    def removed(self) -> list[RemovedAxis]:
        """The parallel axes, such as tp, for which no degree above 1 is legal, each with the
        rule."""
        return removed_axes(self.setting, self.setting.cluster.devices, given(self.config))

    @property
    def choices(self) -> list[Chosen]:
        """The automatic choices for the best layout.

        Empty if no layout fits, or if the plan is for another training system.
        """
        if self.best is None or self.setting.system is not SYSTEMS["meshwright"]:
            return []
        return choices(self.config, self.setting, self.best.layout, self.compile)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of the ranked layouts, one text for each of `COLUMNS`."""
        return [
            (
                layout.layout.label,
                format_bytes(layout.memory.total),
                format_seconds(layout.time.total),
                format_count(layout.tokens_per_s),
                f"{layout.mfu:.1%}",
                "best" if layout is self.best else lost_by(layout, self.found.ranked[0]),
            )
            for layout in self.found.ranked
        ]

    def _headlines(self) -> list[str]:
        """Return lines that say what is trained on which cluster, and whether any layout fits."""
        cluster, train = self.setting.cluster, self.setting.train
        lines = [
            f"{format_count(parameter_count(self.setting.model))} parameters on {cluster.devices} "
            f"x {cluster.device.name}; batch {train.batch} x {train.seq_len} tokens, "
            f"{train.precision}",
            f"{self.found.considered:,} legal layouts considered",
            *assumptions(self.setting.model),
        ]
        if self.best is None:
            lines.append("no layout fits")
        return lines

    def __repr__(self) -> str:
        """Return a short table of the ranked layouts."""
        table = [text_table(COLUMNS, self.rows())] if self.best else []
        return "\n".join([*self._headlines(), *table])

    def _repr_html_(self) -> str:
        """Return the ranked layouts as an HTML table for a notebook."""
        return html_table(COLUMNS, self.rows(), self._headlines())

    def _check_free(self, question: str) -> None:
        """Raise `ConfigError` if the config sets layout keys, which the answer to `question` would
        choose."""
        if pins := given(self.config):
            raise ConfigError(
                f"{question}: its answer chooses the whole layout, and the config fixes "
                f"{words(pins)}; leave that out"
            )

    def fewest_devices(self) -> tuple[int, Prediction] | None:
        """Return the fewest devices that fit and the fastest layout on them:
        `questions.fewest_devices`."""
        self._check_free("--fewest")
        return questions.fewest_devices(self.setting, self.setting.cluster.devices, self.margin)

    def largest_batches(self) -> list[LargestBatch]:
        """Return the largest batch without accumulation by recomputation:
        `questions.largest_batches`."""
        self._check_free("--largest-batch")
        return questions.largest_batches(self.setting, self.setting.cluster.devices, self.margin)

    def longest_context(self) -> tuple[int, Prediction] | None:
        """Return the longest sequence that fits, in tokens, and its layout:
        `questions.longest_context`."""
        self._check_free("--longest-context")
        return questions.longest_context(self.setting, self.setting.cluster.devices, self.margin)

    def fine_tunings(self) -> list[FineTuning]:
        """Return which ways of fine-tuning fit, with their layouts: `questions.fine_tunings`."""
        self._check_free("--fine-tune")
        return fine_tunings(self.setting, self.setting.cluster.devices, self.margin)

    def cheapest(self, prices: Mapping[str, float]) -> list[Offer]:
        """Return kinds and numbers of devices, the lowest cost per token first:
        `questions.cheapest`.

        `prices` has the price of a device for an hour, by its name in the catalogue.
        """
        self._check_free("--cheapest")
        devices = self.setting.cluster.devices
        return questions.cheapest(self.setting, prices, devices, self.margin)


def cost_inputs_of(
    config: Config,
    calibration: Calibration | None = None,
    local_devices: int = _LOCAL_DEVICES,
    processor: Processor | None = None,
    slower: float = 1.0,
    system: str = "meshwright",
) -> CostInputs:
    """Return what prices the layouts of a config: its specs, the cluster, the system and constants.

    `calibration` replaces the constants that the config names. `local_devices` and `processor`
    describe this machine, for the cluster "local". `slower` is the factor by which a device is
    slower than in the catalogue, for example if several ranks share a CPU. `system` is a key of
    `SYSTEMS`. Raises `ConfigError` for unknown names.
    """
    if calibration is None:
        calibration = calibration_named(config.cluster.calibration)
    calibration = calibration.of(config.model, config.train.seq_len)
    catalogue_cluster = resolve_cluster(config.cluster, local_devices, processor)
    cluster = as_measured(catalogue_cluster, calibration)
    if slower != 1:
        cluster = replace(cluster, device=slowed(cluster.device, slower))
    return CostInputs(
        config.model,
        config.train,
        config.optimizer,
        cluster,
        SYSTEMS[system],
        calibration,
        products_of(config.train, cluster.device),
        packed=config.data.packing == "documents",
        imbalance=imbalance_of(config.train, calibration, cluster.device.kind),
    )


def products_of(train: TrainSpec, device: Device) -> str:
    """Return the dtype in which a device computes the matmuls of a training.

    That is "fp8" if the config asks for it and the device has float8 matmuls, else
    `train.precision`.
    """
    return "fp8" if train.fp8 and "fp8" in device.peaks else train.precision


@uncollected()
def plan(
    config: Config,
    top: int = 6,
    calibration: Calibration | None = None,
    margin: float = MARGIN,
    local_devices: int = _LOCAL_DEVICES,
    lacks: str | None = None,
    processor: Processor | None = None,
    slower: float = 1.0,
    prices: KnownPrices | None = None,
) -> Plan:
    """Return the ranked layouts of a config on its cluster; doesn't import torch.

    Ranks the best layout of each of the `top` best kinds (see `Found`) by tokens per second, among
    those that leave the share `margin` of the memory free. Layout keys that the config sets keep
    their values. `lacks` says what the machine's compiler misses; `processor` and `slower` are
    those of `cost_inputs_of`; `prices` caches prices between plans. In the plan's config,
    `train.compile` is resolved for the best layout. Raises `ConfigError` if no layout is legal.
    """
    setting, pins = (
        cost_inputs_of(config, calibration, local_devices, processor, slower),
        given(config),
    )
    device = setting.cluster.device
    if config.train.fp8 and not setting.traits.emulates_float8 and "fp8" not in device.peaks:
        rule = f"train.fp8 = true, but {device.name} has no float8 matmuls"
        raise ConfigError(refusal(rule, legal=["train.fp8 = false"]))
    prices, devices = prices or KnownPrices(), setting.cluster.devices
    asked = setting
    if lacks is not None and config.train.compile == "auto":
        setting = with_compile(setting, compiles=False)
    ranking = Search(setting, devices, margin, pins, prices.of(setting, pins)).run(top)
    if not ranking.considered:
        raise refuse(setting, pins)
    if not ranking.ranked:
        return Plan(config, setting, ranking, margin)
    choice = choose(asked, ranking.ranked[0].layout, lacks)
    priced, setting = setting.compiles, with_compile(setting, compiles=choice.compiled)
    if choice.compiled and not priced:
        ranking = Search(setting, devices, margin, pins, prices.of(setting, pins)).run(top)
    return Plan(decided(config, choice), setting, ranking, margin, choice)


def planned(
    config: Config,
    lacks: str | None = None,
    processor: Processor | None = None,
    slower: float = 1.0,
) -> Config:
    """Return the config with the planner's best layout in it, and `train.compile` resolved.

    Layout keys that were set keep their values; the others get the origin "plan". `lacks`,
    `processor` and `slower` are those of `plan`. Raises `ConfigError` if no layout is legal or
    fits.
    """
    best_plan = plan(config, 1, lacks=lacks, processor=processor, slower=slower)
    if best_plan.best is None:
        nearest_memory = best_plan.found.unfit
        needs = (
            f"; the nearest needs {format_bytes(nearest_memory.total)} a rank"
            if nearest_memory
            else ""
        )
        raise ConfigError(
            f"layout.auto = true: no layout of {best_plan.setting.cluster.devices} devices fits"
            f"{needs}. `meshwright plan` shows what comes nearest"
        )
    layout = best_plan.best.layout
    values = {"auto": False, **layout.model_dump()}
    origins = {f"layout.{key}": "plan" for key in values if not is_given(config, key)}
    config = best_plan.config
    return config.model_copy(
        update={
            "layout": LayoutSection(**values),
            "origins": {**config.origins, **origins, "layout.auto": "plan"},
        }
    )


def digest(config: Config, layout: Layout) -> str:
    """Return a hash (16 hex digits) of what determines a program: model, batch, precision,
    layout."""
    train = config.train.model_dump(mode="json", include={"batch", "seq_len", "precision"})
    inputs = [padded(config.model, layout.tp).identity(), train, layout.model_dump(mode="json")]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def on_cluster(setting: CostInputs, layout: Layout) -> CostInputs:
    """Return the cost inputs with as many devices in the cluster as the layout has ranks."""
    if layout.world == setting.cluster.devices:
        return setting
    return replace(setting, cluster=on_devices(setting.cluster, layout.world))


def explain(setting: CostInputs, layout: Layout) -> Prediction:
    """Return the predicted time and memory of one layout, on as many devices as it has ranks.

    Raises `ConfigError` if it breaks a rule, with the nearest legal layouts.
    """
    check_legal(setting, layout)
    return price(on_cluster(setting, layout), layout)


def check_legal(setting: CostInputs, layout: Layout) -> None:
    """Raise `ConfigError` if a layout breaks a rule, with the nearest legal ones."""
    rule = broken(setting.model, setting.train, layout)
    if rule is not None:
        legal = nearest_legal(setting.model, setting.train, layout)
        raise ConfigError(refusal(f"the layout '{layout.label}': {rule}", legal=legal))


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON: memory by category, seconds by cause, throughput and MFU."""
    return {
        "layout": prediction.layout.model_dump(mode="json"),
        "label": prediction.layout.label,
        "fits": prediction.memory.fits,
        "peak_memory_bytes": round(prediction.memory.total),
        "peak_memory_interval_bytes": [round(bound) for bound in prediction.memory_interval],
        "worst_rank": prediction.memory.rank * (prediction.layout.world // prediction.layout.pp),
        "peak_at": prediction.memory.at,
        "memory_bytes": {
            name: round(byte_count) for name, byte_count in prediction.memory.by_category().items()
        },
        "step_time_s": prediction.time.total,
        "step_time_interval_s": list(prediction.interval),
        "seconds": prediction.time.causes,
        "tokens_per_s": prediction.tokens_per_s,
        "tflops_per_device": prediction.tflops_per_device,
        "mfu": prediction.mfu,
    }


def assumptions(model: ModelSpec) -> list[str]:
    """Return the assumptions about a model that can be planned but not trained here, one per line.

    Empty for models that can be trained.
    """
    if model.planned is None:
        return []
    name = model.planned.model_type
    first = f"planned, not trainable here: {name} is read from the shapes of its config.json"
    return [first, *(f"assumed: {line}" for line in model.planned.assumed)]


def as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON: config, layout, digest, prediction, and why each other layout lost."""
    best, ranking = plan.best, plan.found
    cluster = plan.setting.cluster
    return {
        "removed_axes": [
            {**axis._asdict(), "nearest": list(axis.nearest)} for axis in plan.removed
        ],
        "config": portable(plan.config).model_dump(mode="json"),
        "unnamed": [key for key in OF_DATA if plan.config.origins.get(key) == "default"],
        "cluster": {
            "device": cluster.device.name,
            "devices": cluster.devices,
            "devices_per_node": cluster.per_node,
            "links": [cluster.inner.name, cluster.outer.name],
        },
        "calibration": {
            "date": plan.setting.calibration.date,
            "source": plan.setting.calibration.source,
        },
        "assumed": assumptions(plan.setting.model),
        "fixed": given(plan.config),
        "considered": ranking.considered,
        "ruled_out": ranking.reasons,
        "layout": best.layout.model_dump(mode="json") if best else None,
        "digest": digest(plan.config, best.layout) if best else None,
        "compile": {"compiled": plan.compile.compiled, "why": plan.compile.reason},
        "choices": [
            {"what": choice.subject, "text": choice.text, "gain": choice.gain, "key": choice.key}
            for choice in plan.choices
        ],
        "ledger": prediction_json(best) if best else None,
        "evidence": evidence(plan.setting, best.layout) if best else None,
        "warnings": warnings(best, plan.setting) if best else [],
        "ranked": [
            {
                **prediction_json(prediction),
                "why": lost_by(prediction, best) if best and prediction is not best else "best",
            }
            for prediction in ranking.ranked
        ],
    }


# What train derives where they are left out: at least one of the two degrees is given.
_DERIVED = ("dp_replicate", "dp_shard")


def training_command(arguments: Sequence[str], plan: Plan, name: str | None = None) -> str | None:
    """Return the shell command that trains a plan's best layout.

    None if no layout fits, or if the model can only be planned. `arguments` are the config path and
    the overrides of the plan; the layout keys that the planner chose are appended. With several
    nodes, the command is `launch torchrun`, which writes a command for each node. `name` sets
    `log.name`, if the config's name is taken.
    """
    if plan.best is None or plan.setting.model.planned is not None:
        return None
    cluster = plan.setting.cluster
    start = ["train"] if cluster.devices <= cluster.per_node else ["launch", "torchrun"]
    named = [] if name is None else [f"log.name={name}"]
    return shlex.join(["meshwright", *start, *arguments, *_chosen(plan), *named])


def _chosen(plan: Plan) -> list[str]:
    """Return the layout keys that the planner chose for the best layout, as `layout.KEY=VALUE`.

    Keys that the config sets and values that are the default are left out.
    """
    assert plan.best is not None
    pins, plain = given(plan.config), LayoutSection()
    values = plan.best.layout.model_dump()
    overrides = {
        key: value
        for key, value in values.items()
        if key not in pins and value != getattr(plain, key) and (key not in _DERIVED or value > 1)
    }
    if not any(key in overrides or key in pins for key in _DERIVED):
        overrides["dp_replicate"] = values["dp_replicate"]
    auto = ["layout.auto=false"] if plan.config.layout.auto else []
    return [*auto, *(f"layout.{key}={_word(value)}" for key, value in overrides.items())]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
