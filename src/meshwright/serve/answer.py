"""`answer`: what the page of `plan --serve` asks, as one document of JSON that it draws.

A question is the words of a command line, `section.key=value`, each checked by the loader of
configs, and labels of layouts to show in detail.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError, MeshwrightError, refusal
from meshwright.layout import Layout
from meshwright.predict.price import Prediction, memories, price
from meshwright.predict.setting import Setting
from meshwright.predict.spans import pipeline_spans
from meshwright.predict.step import pace_of
from meshwright.search.advice import lost_by, warnings
from meshwright.search.pins import given
from meshwright.search.plan import Plan, check_legal, on_cluster, plan, prediction_json
from meshwright.search.scaling import counts_between, curve
from meshwright.spec.catalogue import LOCAL
from meshwright.spec.dump import given_toml, toml_value
from meshwright.spec.hf import spec_from_hf
from meshwright.spec.loading import Config, load_config, read_given
from meshwright.spec.parts import parameter_count
from meshwright.units import format_bytes, format_count

# What the page may set: nothing that writes, and nothing of another run.
SECTIONS: Final = ("model", "train", "cluster", "layout", "lora")
_MOST_WORDS: Final = 64
_MOST_SHOWN: Final = 2
_TOP: Final = 8
# So many actions are drawn of a step, and so many numbers of devices are planned for a curve.
_MOST_SPANS: Final = 1500
_MOST_COUNTS: Final = 12
_TOKENS: Final = 1e12


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a question; raises `ConfigError` for one that makes no sense."""
    words, shown = _words(question), _labels(question)
    config = _config(words)
    made = plan(config, _TOP)
    best = made.best
    labels = shown or ([best.layout.label] if best else [])
    return {
        "words": words,
        "command": shlex.join(["meshwright", "plan", *words]),
        "config": given_toml(read_given(None, words)),
        "asked": _asked(made.setting),
        "limit": made.setting.cluster.device.memory,
        "considered": made.found.considered,
        "ruled_out": made.found.reasons,
        "fixed": {key: str(value) for key, value in given(config).items()},
        "ranked": [
            {
                **prediction_json(one),
                "why": "best" if one is best or best is None else lost_by(one, best),
            }
            for one in made.found.ranked
        ],
        "unfit": _unfit(made),
        "shown": [_shown(made, label) for label in labels],
    }


def devices_answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the best layout of each number of devices from `first` to `last`, doubling."""
    words = _words(question)
    first, last = (question.get(key) for key in ("first", "last"))
    for name, one in (("first", first), ("last", last)):
        if not isinstance(one, int) or isinstance(one, bool) or not 1 <= one <= 1 << 17:
            raise ConfigError(f"{name} = {one!r} must be a number of devices, from 1 to {1 << 17}")
    assert isinstance(first, int)
    assert isinstance(last, int)
    if first > last:
        raise ConfigError(f"first = {first} must be at most last = {last}")
    counts = counts_between(first, last)[:_MOST_COUNTS]
    config = _config(words)
    made = plan(config, 1)
    points = curve(made.setting, counts, _TOKENS, config.cluster.price, pins=given(config))
    return {"points": [one.as_json() for one in points]}


def model_words(document: Any) -> list[str]:
    """Return the words that make the model of a Hugging Face `config.json`."""
    if not isinstance(document, dict):
        raise ConfigError("the model's config.json is no JSON object")
    spec = spec_from_hf(document)
    defaults = {key: field.default for key, field in type(spec).model_fields.items()}
    dumped = spec.model_dump(mode="json", exclude_none=True)
    return [
        f"model.{key}={toml_value(value)}"
        for key, value in dumped.items()
        if getattr(spec, key) != defaults[key] and key != "lora"
    ]


def _words(question: Mapping[str, Any]) -> list[str]:
    found = question.get("words", [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError("words must be a list of texts such as 'train.batch=1024'")
    if len(found) > _MOST_WORDS:
        raise ConfigError(f"{len(found)} words; a question has at most {_MOST_WORDS}")
    for word in found:
        section = word.partition("=")[0].partition(".")[0]
        if section not in SECTIONS:
            raise ConfigError(refusal(f"{word[:80]}: the page does not set it", legal=SECTIONS))
    return found


def _labels(question: Mapping[str, Any]) -> list[str]:
    found = question.get("show", [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError("show must be a list of layouts such as 'tp2 mb1'")
    if len(found) > _MOST_SHOWN:
        raise ConfigError(f"{len(found)} layouts to show; at most {_MOST_SHOWN} stand side by side")
    return found


def _config(words: list[str]) -> Config:
    config = load_config(None, words)
    if config.cluster.preset == LOCAL:
        raise ConfigError(
            "the page plans for devices of the catalogue: set cluster.preset, such as "
            "cluster.preset=h100-sxm; `meshwright plan` plans for this machine"
        )
    return config


def _asked(setting: Setting) -> str:
    cluster, train = setting.cluster, setting.train
    return (
        f"{format_count(parameter_count(setting.model))} parameters on {cluster.devices} x "
        f"{cluster.device.name}; batch {train.batch} x {train.seq_len} tokens, {train.precision}"
    )


def _unfit(made: Plan) -> str | None:
    held, layout = made.found.unfit, made.found.unfit_layout
    if held is None or layout is None:
        return None
    needs = f"{format_bytes(held.total)} of {format_bytes(held.limit)}"
    return f"No layout fits. The nearest is {layout.label}, which needs {needs}."


def _shown(made: Plan, label: str) -> dict[str, Any]:
    """Return a layout in detail, or why it is none."""
    try:
        layout = Layout.parse(label)
        check_legal(made.setting, layout)
        setting = on_cluster(made.setting, layout)
        found = price(setting, layout)
        return {
            **prediction_json(found),
            "why_not": _why_not(made, found),
            "warnings": warnings(found, setting),
            "ranks": [
                {"rank": held.rank, "bytes": held.by_category(), "total": held.total}
                for held in memories(setting, layout)
            ],
            "timeline": _timeline(setting, found),
        }
    except MeshwrightError as error:
        return {"label": label[:200], "why_not": str(error), "refused": True}


def _why_not(made: Plan, found: Prediction) -> str:
    """Return why a layout is not the best one."""
    said = []
    if found.devices != made.setting.cluster.devices:
        said.append(f"it has {found.devices} ranks, not {made.setting.cluster.devices}")
    others = {
        key: value
        for key, value in given(made.config).items()
        if getattr(found.layout, key) != value
    }
    said += [f"{key} is fixed to {value}" for key, value in others.items()]
    held, share = found.memory, 1 - made.margin
    if held.total > held.limit * share:
        room = format_bytes(held.limit * share)
        said.append(f"it needs {format_bytes(held.total)}; {room} are to be filled")
    if made.best is not None and found.layout != made.best.layout:
        said.append(lost_by(found, made.best))
    return "; ".join(said) or "it is the best"


def _timeline(setting: Setting, found: Prediction) -> dict[str, Any]:
    """Return the actions of each pipeline rank: kind, start, end, stage, microbatch."""
    layout, time = found.layout, found.time
    slowest = time.ranks[time.slowest]
    after = slowest["data"] + slowest["optimizer"] + slowest["host"]
    kernels = setting.kernels()
    pace = pace_of(setting, kernels, layout)
    drawn = pipeline_spans(setting, kernels, layout, pace, time.total - after)
    most = _MOST_SPANS // layout.pp
    ranks = [[s for s in one.spans if s.track == "compute"] for one in drawn]
    return {
        "total": time.total,
        "actions_end": time.total - after,
        "left_out": sum(max(len(own) - most, 0) for own in ranks),
        "ranks": [
            [[s.name, s.start, s.end, s.stage, s.microbatch] for s in own[:most]] for own in ranks
        ],
    }
