"""Answers a question of the plan page, a config with options, by a JSON document that it draws.

The document has the details of each layout that is shown: price, why it is not the best, memory,
timeline.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshwright.cost.calibration import SHIPPED, shipped_calibration
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import OUTSIDE, Prediction, memories, price
from meshwright.cost.spans import pipeline_spans
from meshwright.cost.step import pace_of
from meshwright.errors import ConfigError, MeshwrightError, refusal
from meshwright.layout import Layout
from meshwright.planner.advice import lost_by, warnings
from meshwright.planner.plan import Plan, check_legal, on_cluster, prediction_json, training_command
from meshwright.planner.scaling import counts_between, curve
from meshwright.planner.space import given
from meshwright.program.profile import Span
from meshwright.report.agreement import PROCESS, TENSORS
from meshwright.serve.conditions import Conditions
from meshwright.spec.dump import given_toml, toml_value
from meshwright.spec.hf_shapes import planned_from_hf
from meshwright.spec.loading import Config, load_config, read_given
from meshwright.spec.parts import parameter_count
from meshwright.spec.presets import LOCAL
from meshwright.spec.resolve import Values
from meshwright.spec.words import HAS_RUN
from meshwright.units import format_bytes, format_count

# So many actions are drawn of a step.
_MOST_SPANS: Final = 1500


def detail(plan: Plan, label: str) -> dict[str, Any]:
    """Return the details of one layout, or `{"error": ...}` if it is not legal.

    `label` is a layout's label, such as "tp2 mb1".
    """
    try:
        layout = Layout.parse(label)
        check_legal(plan.setting, layout)
        setting = on_cluster(plan.setting, layout)
        prediction = price(setting, layout)
        return {
            **prediction_json(prediction),
            "peak_name": _peak_name(prediction),
            "why_not": _why_not(plan, prediction),
            "warnings": warnings(prediction, setting),
            "ranks": [
                {
                    "rank": rank_memory.rank,
                    "bytes": rank_memory.by_category(),
                    "total": rank_memory.total,
                }
                for rank_memory in memories(setting, layout)
            ],
            "timeline": _timeline(setting, prediction),
        }
    except MeshwrightError as error:
        return {"label": label[:200], "why_not": str(error), "refused": True}


def _peak_name(prediction: Prediction) -> str:
    """Return the name of the predicted peak: the process's if it includes more than tensors."""
    categories = prediction.memory.by_category()
    return PROCESS if any(categories.get(name) for name in OUTSIDE) else TENSORS


def _why_not(plan: Plan, prediction: Prediction) -> str:
    """Return why a layout is not the best one, or "" for the best."""
    reasons = []
    if prediction.devices != plan.setting.cluster.devices:
        reasons.append(f"it has {prediction.devices} ranks, not {plan.setting.cluster.devices}")
    differing = {
        key: value
        for key, value in given(plan.config).items()
        if getattr(prediction.layout, key) != value
    }
    reasons += [f"{key} is fixed to {value}" for key, value in differing.items()]
    memory, share = prediction.memory, 1 - plan.margin
    if memory.total > memory.limit * share:
        available = format_bytes(memory.limit * share)
        reasons.append(
            f"it does not fit: it needs {format_bytes(memory.total)} of {available} usable"
        )
    elif plan.best is not None and prediction.layout != plan.best.layout:
        reasons.append(lost_by(prediction, plan.best))
    return "; ".join(reasons)


def _timeline(setting: CostInputs, prediction: Prediction) -> dict[str, Any]:
    """Return the actions of each pipeline rank: kind, start, end, stage, microbatch.

    In a long step, those in the middle are left out: `fold` has their start and end in seconds.
    """
    layout, time = prediction.layout, prediction.time
    slowest = time.ranks[time.slowest]
    after = slowest["data"] + slowest["optimizer"] + slowest["host"]
    kernels = setting.kernels()
    pace = pace_of(setting, kernels, layout)
    drawn = pipeline_spans(setting, kernels, layout, pace, time.total - after)
    limit = _MOST_SPANS // layout.pp
    ranks = [[s for s in rank_profile.spans if s.track == "compute"] for rank_profile in drawn]
    fold = _fold(ranks, limit)
    shown = [
        [s for s in rank_spans if fold is None or not fold[0] <= s.start < fold[1]]
        for rank_spans in ranks
    ]
    return {
        "total": time.total,
        "actions_end": time.total - after,
        "fold": fold,
        "left_out": sum(map(len, ranks)) - sum(map(len, shown)),
        "ranks": [
            [[s.name, _digits(s.start), _digits(s.end), s.stage, s.microbatch] for s in rank_spans]
            for rank_spans in shown
        ],
    }


def _fold(ranks: Sequence[Sequence[Span]], limit: int) -> tuple[float, float] | None:
    """Return the start and end of the part of a step to leave out, or None.

    `limit` is the number of actions drawn of each rank.
    """
    end_actions = limit // 2
    long = [rank_spans for rank_spans in ranks if len(rank_spans) > 2 * end_actions]
    if not long:
        return None
    start, stop = (
        max(rank_spans[end_actions - 1].end for rank_spans in long),
        min(rank_spans[-end_actions].start for rank_spans in long),
    )
    return (start, stop) if start < stop else None


def _digits(seconds: float) -> float:
    """Return seconds with six significant digits, since a page has thousands of them."""
    return float(f"{seconds:.6g}")


# What the page may set: nothing that writes, and nothing of another run.
SECTIONS: Final = ("model", "train", "cluster", "layout", "lora")
# Keys that name files or folders of this machine.
FILES: Final = ("cluster.calibration", "lora.init_from", "model.init_from")
_MOST_WORDS: Final = 64
_MOST_SHOWN: Final = 2
# So many numbers of devices are planned for a curve, and so many tokens are trained on.
_MOST_COUNTS: Final = 12
_TOKENS: Final = 1e12
_MOST_TOKENS: Final = 1e18
_PLAIN: Final = Conditions()


def answer(question: Mapping[str, Any], conditions: Conditions = _PLAIN) -> dict[str, Any]:
    """Return the document of the plan that a question asks for; raises `ConfigError` if invalid."""
    arguments, shown = _words(question, conditions), _labels(question)
    plan = conditions.plan(_config(arguments))
    labels = shown or ([plan.best.layout.label] if plan.best else [])
    return document(plan, arguments, labels, read_given(None, arguments), conditions.flags)


def document(
    plan: Plan,
    arguments: Sequence[str],
    labels: Sequence[str],
    stated: Mapping[str, Values],
    flags: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the JSON document of a plan, with the details of the layouts in `labels`.

    `arguments` and `flags` are those of the command line; `stated` has the values that it and its
    config file set.
    """
    best, known = plan.best, plan.setting.calibration
    return {
        "command": shlex.join(["meshwright", "plan", *arguments, *flags]),
        "train": training_command(arguments, plan),
        "config": given_toml(stated),
        "asked": _asked(plan.setting),
        "defaults": _defaults(plan),
        "calibration": {"source": known.source, "date": known.date},
        "is_shipped": known is shipped_calibration(),
        "has_run": HAS_RUN,
        "limit": plan.setting.cluster.device.memory,
        "considered": plan.found.considered,
        "ruled_out": plan.found.reasons,
        "fixed": {key: str(value) for key, value in given(plan.config).items()},
        "choices": [[choice.subject, choice.text] for choice in plan.choices],
        "ranked": [
            {
                **prediction_json(prediction),
                "why": "best" if prediction is best or best is None else lost_by(prediction, best),
            }
            for prediction in plan.found.ranked
        ],
        "unfit": _unfit(plan),
        "shown": [detail(plan, label) for label in labels],
    }


def asked_words(stated: Mapping[str, Values]) -> list[str]:
    """Return the settings that the page can change as arguments `section.key=value`."""
    return [
        f"{section}.{key}={_word(value.value)}"
        for section in SECTIONS
        for key, value in stated.get(section, {}).items()
        if value.value is not None
    ]


def _word(value: Any) -> str:
    """Return a value as in a command-line override; plain names are without quotes."""
    is_name = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.-]*", value)
    return str(value) if is_name and value not in ("true", "false") else toml_value(value)


def devices_answer(question: Mapping[str, Any], conditions: Conditions = _PLAIN) -> dict[str, Any]:
    """Return the best layout for each number of devices from `first` to `last`, doubling.

    These are fields of the question. Raises `ConfigError` for an invalid question.
    """
    arguments = _words(question, conditions)
    first, last = (question.get(key) for key in ("first", "last"))
    for name, value in (("first", first), ("last", last)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 17:
            raise ConfigError(
                f"{name} = {value!r} must be a number of devices, from 1 to {1 << 17}"
            )
    assert isinstance(first, int)
    assert isinstance(last, int)
    if first > last:
        raise ConfigError(f"first = {first} must be at most last = {last}")
    counts = counts_between(first, last)[:_MOST_COUNTS]
    config = _config(arguments)
    plan = conditions.plan(config)
    price, pins = config.cluster.price, given(config)
    points = curve(plan.setting, counts, _tokens(question), price, conditions.margin, pins)
    return {"points": [point.as_json() for point in points]}


def _tokens(question: Mapping[str, Any]) -> float:
    """Return the question's number of training tokens, written with or without K, M, B or T.

    Raises `ConfigError` if it is invalid; without one, it is 1T.
    """
    text = str(question.get("tokens") or "").strip().replace(",", "")
    if not text:
        return _TOKENS
    number, unit = (text[:-1], text[-1].upper()) if text[-1].isalpha() else (text, "")
    try:
        tokens = float(number) * {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[unit]
    except (KeyError, ValueError):
        tokens = 0.0
    if not 1 <= tokens <= _MOST_TOKENS:
        rule = f"tokens = {text[:40]!r} must be a number from 1 to 1e18"
        raise ConfigError(refusal(rule, legal=["300B", "1T", "1.5e12"]))
    return tokens


def model_words(document: Any) -> list[str]:
    """Return a Hugging Face `config.json`'s model as arguments `model.key=value`."""
    if not isinstance(document, dict):
        raise ConfigError("the model's config.json is not a JSON object")
    spec = planned_from_hf(document)
    defaults = {key: field.default for key, field in type(spec).model_fields.items()}
    dumped = spec.model_dump(mode="json", exclude_none=True)
    return [
        f"model.{key}={toml_value(value)}"
        for key, value in dumped.items()
        if getattr(spec, key) != defaults[key] and key != "lora"
    ]


def named_files(stated: Mapping[str, Values]) -> dict[str, str]:
    """Return the config keys that name files or folders, with their values."""
    values = {f"{name}.{key}": value for name in SECTIONS for key, value in stated[name].items()}
    return {key: str(values[key].value) for key in FILES if key in values and values[key].value}


def _words(question: Mapping[str, Any], conditions: Conditions) -> list[str]:
    arguments = question.get("words", [])
    if not isinstance(arguments, list) or not all(isinstance(text, str) for text in arguments):
        raise ConfigError("words must be a list of texts such as 'train.batch=1024'")
    if len(arguments) > _MOST_WORDS:
        raise ConfigError(f"{len(arguments)} words; a question has at most {_MOST_WORDS}")
    for argument in arguments:
        section = argument.partition("=")[0].partition(".")[0]
        if section not in SECTIONS:
            raise ConfigError(refusal(f"{argument[:80]}: the page does not set it", legal=SECTIONS))
    for key, name in named_files(read_given(None, arguments)).items():
        if name not in (conditions.files.get(key), SHIPPED if key == FILES[0] else None):
            rule = f"{key} = {name[:80]}: the page names no files; start `plan --serve` with it"
            raise ConfigError(rule)
    return arguments


def _labels(question: Mapping[str, Any]) -> list[str]:
    labels = question.get("show", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ConfigError("show must be a list of layouts such as 'tp2 mb1'")
    if len(labels) > _MOST_SHOWN:
        raise ConfigError(
            f"{len(labels)} layouts to show; at most {_MOST_SHOWN} stand side by side"
        )
    return labels


def _config(arguments: list[str]) -> Config:
    config = load_config(None, arguments, plans=True)
    if config.cluster.preset == LOCAL:
        raise ConfigError(
            "the page plans for devices of the catalogue: set cluster.preset, such as "
            "cluster.preset=h100-sxm; `meshwright plan` plans for this machine"
        )
    return config


def _defaults(plan: Plan) -> dict[str, str]:
    """Return the value, in words, that applies if a field of the page is empty, by config key."""
    train, cluster = plan.setting.train, plan.setting.cluster
    return {
        "model.preset": f"a {plan.config.model.family} of {plan.config.model.n_layers} layers",
        "cluster.nodes": str(cluster.nodes),
        "cluster.devices_per_node": str(cluster.per_node),
        "train.batch": str(train.batch),
        "train.seq_len": str(train.seq_len),
        "train.precision": train.precision,
    }


def _asked(setting: CostInputs) -> str:
    cluster, train = setting.cluster, setting.train
    return (
        f"{format_count(parameter_count(setting.model))} parameters on {cluster.devices} x "
        f"{cluster.device.name}; batch {train.batch} x {train.seq_len} tokens, {train.precision}"
    )


def _unfit(plan: Plan) -> str | None:
    memory, layout = plan.found.unfit, plan.found.unfit_layout
    if memory is None or layout is None:
        return None
    needs = f"{format_bytes(memory.total)} of {format_bytes(memory.limit)}"
    return f"No layout fits. The nearest is {layout.label}, which needs {needs}."
