"""Loads a config: TOML file and overrides to a strict `Config`, with every value's origin."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import ConfigError, MeshwrightError, nearest, refusal
from meshwright.files import read_text
from meshwright.parsing import parse_json, parse_toml, printable
from meshwright.spec import hub
from meshwright.spec.families import FAMILIES
from meshwright.spec.groups import empty_group
from meshwright.spec.hf import refuse_model_type
from meshwright.spec.kinds import Spec, is_of_kind, kind_of, shown, tables_in
from meshwright.spec.lora import LoraSection
from meshwright.spec.meant import ELSEWHERE, meant, within
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parts
from meshwright.spec.peft import read_adapter_config
from meshwright.spec.presets import LOCAL, check_device, check_link, full_device_name, preset_of
from meshwright.spec.resolve import (
    Value,
    Values,
    check_held_out,
    default_rate,
    default_tokenizer,
    default_training,
    resolve_model,
)
from meshwright.spec.synonyms import instead_of
from meshwright.spec.training import (
    CheckpointSpec,
    ClusterSpec,
    DataSpec,
    LayoutSection,
    LogSpec,
    OptimizerSpec,
    TrainSpec,
)


class Config(Spec):
    """A complete config; `origins` maps each `section.key` to where its value came from."""

    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    optimizer: OptimizerSpec
    layout: LayoutSection
    cluster: ClusterSpec
    checkpoint: CheckpointSpec
    log: LogSpec
    lora: LoraSection
    origins: dict[str, str] = Field(default_factory=dict, exclude=True, repr=False)

    def __repr__(self) -> str:
        """Return the values that are not the defaults; `model_dump()` has all."""
        given = [
            f"{key}={getattr(getattr(self, key.partition('.')[0]), key.partition('.')[2])!r}"
            for key, origin in self.origins.items()
            if origin != "default"
        ]
        return f"Config({', '.join(given)})"

    __str__ = __repr__


SECTIONS: Mapping[str, type[Spec]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Spec)
}


# The key that another section fills.
OF_SECTION: Final = ("model", "lora")
# What a config may state, by section.
KEYS: Mapping[str, tuple[str, ...]] = {
    name: tuple(key for key in spec.model_fields if (name, key) != OF_SECTION)
    for name, spec in SECTIONS.items()
}
# Sections that are asked for, and what there is instead.
_MISSING: Final = ("dpo", "orpo", "kto")
_INSTEAD: Final = "Preference optimisation is not supported; train on the answers that were chosen"


class _Alias(NamedTuple):
    """The key that a short name stands for, and the key's value for each value of the name."""

    key: str
    values: Mapping[str, Any] | None = None


# By torch's and Accelerate's names, and by the short ones of tutorials.
_ZERO_OF_STRATEGY = {
    "NO_SHARD": 0,
    "SHARD_GRAD_OP": 2,
    "FULL_SHARD": 3,
    "no": 0,
    "none": 0,
    "grad_op": 2,
    "full": 3,
}
ALIASES: Mapping[str, _Alias] = {
    "embed_dim": _Alias("model.dim"),
    "n_heads": _Alias("model.n_heads"),
    "n_layers": _Alias("model.n_layers"),
    "context_len": _Alias("train.seq_len"),
    "batch_size": _Alias("train.batch"),
    "tensor_parallel_size": _Alias("layout.tp"),
    "fsdp": _Alias("layout.zero", {"true": 3, "false": 0}),
    "shard_strategy": _Alias("layout.zero", _ZERO_OF_STRATEGY),
    "zero_opt": _Alias("layout.zero"),
}
# The keys that may be an id of the Hub.
_OF_HUB: Final = (("model", "init_from"), ("lora", "init_from"), ("data", "tokenizer"))
# The alias of a model's name or folder.
_MODEL: Final = "model"
# Values that are asked for, and the keys that have them.


# Linux allows 255 bytes of a name and 4,095 of a path; folders of a run go below some of these.
_LONGEST_NAME: Final = 255
_LONGEST_TEXT: Final = 3500
_NO_TEXT: Final = re.compile("[\x00-\x08\x0b-\x1f\ud800-\udfff]")

# Values that follow from other keys where they are left out. A run's own config has all values:
# with a new value of another key they are derived again.
_FOLLOWS: Final[Mapping[str, tuple[str, ...]]] = {
    "train.steps": ("train.epochs",),
    "optimizer.warmup_steps": ("train.steps", "optimizer.schedule_steps"),
    "cluster.hang": ("cluster.timeout",),
}
_DERIVED: Final = ("derived", "default")
PROVENANCE: Final = "provenance.json"  # beside the config of a run: where its values came from

Sections = Mapping[str, Mapping[str, Any]]
T = TypeVar("T", bound=Spec)


def load_config(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    plan: Sections | None = None,
    plans: bool = False,
) -> Config:
    """Return the config of a TOML file or a dict, with overrides.

    A dict holds sections, `{"model": {"dim": 64}}`, or keys, `{"model.dim": 64}`. Overrides are
    such a dict, or texts `section.key=value`; both may use the aliases. Without a source, the
    built-in defaults apply. The values of a `plan`, by section, come between the source and the
    overrides, with the origin "plan". With `plans`, the config is only to be planned, so a model
    that cannot be trained here is taken, too. Raises `ConfigError` naming the key, the value, its
    origin, the rule, and the nearest legal value.
    """
    return build_config(read_given(source, overrides, plan=plan), plans=plans)


def read_given(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    plan: Sections | None = None,
) -> dict[str, Values]:
    """Return the values of a source, a plan and overrides (later ones win), with origins.

    Raises `ConfigError` for unreadable files and unknown keys.
    """
    stated: dict[str, Values] = {name: {} for name in SECTIONS}
    if isinstance(source, Mapping):
        _merge(stated, _read_mapping(source, "config"))
    elif source is not None:
        _merge(stated, _read_toml(Path(source)))
        _mark_derived(stated, Path(source).with_name(PROVENANCE))
    stored = {name: dict(values) for name, values in stated.items()}
    _merge(stated, _read_mapping(plan or {}, "plan"))
    if isinstance(overrides, Mapping):
        _merge(stated, _read_mapping(overrides, "override"))
    elif isinstance(overrides, str):
        raise ConfigError(f"overrides = {overrides!r} must be a list of texts, or a dict")
    else:
        _merge(stated, _read_overrides(overrides))
    _drop_derived(stated, stored)
    return stated


def _mark_derived(stated: dict[str, Values], provenance: Path) -> None:
    """Give the values of a run that were derived their origin again, if the run states it."""
    try:
        origins = parse_json(read_text(provenance))
    except (OSError, ValueError):  # no run's, or a damaged one
        return
    for name in _FOLLOWS if isinstance(origins, Mapping) else ():
        section, key = name.split(".")
        origin = origins.get(name)
        if key in stated[section] and isinstance(origin, str) and origin.startswith(_DERIVED):
            stated[section][key] = stated[section][key]._replace(origin=origin)


def _drop_derived(stated: dict[str, Values], stored: Mapping[str, Values]) -> None:
    """Drop derived values of a run for whose other keys there are new values; see `_FOLLOWS`."""

    def value_of(values: Mapping[str, Values], name: str) -> Any:
        section, key = name.split(".")
        return values[section].get(key, Value(None, "")).value

    for name, sources in _FOLLOWS.items():
        section, key = name.split(".")
        is_derived = stated[section].get(key, Value(None, "")).origin.startswith(_DERIVED)
        if is_derived and any(
            value_of(stated, source) != value_of(stored, source) for source in sources
        ):
            del stated[section][key]


def _read_mapping(values: Mapping[str, Any], origin: str) -> list[tuple[str, str, Value]]:
    """Return the values of a dict of sections, of keys with their section, or of both."""
    entries = []
    for name, value in values.items():
        if not isinstance(value, Mapping) or "." in name:
            entries.append(_read_key(name, _plain(value), origin))
        elif name not in SECTIONS:
            _check_known(name, "", origin)
        else:
            entries += [(name, key, Value(_plain(inner), origin)) for key, inner in value.items()]
    return entries


def _plain(value: Any) -> Any:
    """Return a value of Python as TOML would have it: a path is a text."""
    return str(value) if isinstance(value, Path) else value


def build_config(stated: dict[str, Values], *, plans: bool = False) -> Config:
    """Return the complete config of the stated values by section; derives missing ones.

    `plans` as in `load_config`.
    """
    if (device := stated["cluster"].get("preset")) is not None:
        stated["cluster"]["preset"] = device._replace(value=full_device_name(device.value))
    preset = stated["model"].get("preset", Value(None, ""))
    if isinstance(preset.value, str) and (name := preset_of(preset.value)) is not None:
        stated["model"]["preset"] = preset._replace(value=name)
    for name, spec in SECTIONS.items():
        _check_texts(name, stated[name])
        _check_types(name, spec, stated[name])
    _check_cluster(stated["cluster"])
    _settle_length(stated["train"])
    check_held_out(stated)
    _pin(stated)
    _derive(stated)
    sections: dict[str, Spec] = {}
    origins: dict[str, str] = {}
    for name, spec in SECTIONS.items():
        values = stated[name]
        sections[name] = _built(name, spec, values)
        for key in KEYS[name]:
            origins[f"{name}.{key}"] = values[key].origin if key in values else "default"
    config = Config.model_validate({**sections, "origins": origins})
    _check_groups(config)
    _check_rounding(config)
    if not plans and config.model.planned is not None:
        raise ConfigError(_planned_only(config))
    return config


def _check_groups(config: Config) -> None:
    """Refuse groups of the optimizer that have none of the model's trained parameters."""
    if not config.optimizer.groups:
        return
    names = [part.name for part in parts(config.model) if part.trained]
    reason = empty_group(config.optimizer.groups, names, config.origins["optimizer.groups"])
    if reason is not None:
        raise ConfigError(reason)


def _check_rounding(config: Config) -> None:
    """Refuse stochastic rounding where an update rounds nothing."""
    if config.optimizer.rounding != "stochastic" or config.train.master == "none":
        return
    if config.optimizer.state_dtype != "bf16":
        how = "not rounded" if config.optimizer.state_dtype == "fp32" else "rounded to nearest"
        rule = f"states in {config.optimizer.state_dtype} are {how}, and master weights stay fp32"
        rule = f"optimizer.rounding = stochastic: {rule}"
        legal = ["optimizer.state_dtype = bf16", "train.master = none"]
        raise ConfigError(refusal(rule, legal=[*legal, "optimizer.rounding = nearest"]))


def _planned_only(config: Config) -> str:
    """Return the refusal of a model that can be planned, but not trained."""
    model = config.model
    assert model.planned is not None
    where = "" if model.init_from is None else f"model.init_from = {model.init_from!r}: "
    known = [family.model_type for family in FAMILIES.values()]
    text = refuse_model_type(model.planned.model_type, known)
    return f"{where}{text}. It is planned only, from its shapes: `meshwright plan`"


def _built(name: str, spec: type[T], values: Values) -> T:
    """Return a section's spec; raises `ConfigError` for a broken rule."""
    try:
        return spec(**{key: value.value for key, value in values.items()})
    except ValidationError as error:
        raise ConfigError(_word(error.errors()[0], name, values)) from None


def _check_texts(name: str, values: Values) -> None:
    """Refuse texts that no file can have as its name, whatever they are for."""
    for key, value in values.items():
        items = value.value if isinstance(value.value, list | tuple) else [value.value]
        for text in (item for item in items if isinstance(item, str)):
            if _NO_TEXT.search(text):
                rule = f"{name}.{key} = {printable(repr(text))} ({printable(value.origin)})"
                raise ConfigError(f"{rule} has control characters")
            coded = text.encode()
            if max(map(len, coded.split(b"/"))) > _LONGEST_NAME or len(coded) > _LONGEST_TEXT:
                rule = f"{name}.{key} = {text[:40]}... has {len(coded)} bytes"
                limits = f"{_LONGEST_TEXT}, and {_LONGEST_NAME} between two slashes"
                raise ConfigError(f"{rule}; at most {limits}")


def _check_types(name: str, spec: type[Spec], values: Values) -> None:
    """Refuse a given value of a wrong type or range, so that deriving may rely on them.

    What is missing is derived later, and rules between values are checked when all are there.
    """
    try:
        spec(**{key: value.value for key, value in values.items()})
    except ValidationError as error:
        for detail in error.errors():
            if detail["loc"] and detail["type"] != "missing":
                raise ConfigError(_word(detail, name, values)) from None


def _check_cluster(values: Values) -> None:
    """Refuse names of devices and links that the catalogue lacks."""
    preset, links = (values.get(key, Value(None, "")) for key in ("preset", "links"))
    if preset.value not in (None, LOCAL):
        check_device(preset.value, f" ({preset.origin})")
    for link in links.value or ():
        check_link(link, f" ({links.origin})")


def _settle_length(train: Values) -> None:
    """Let an override of the steps take the place of epochs; refuse overrides of both.

    A run's config has both, as a start sets the steps that the epochs are.
    """
    epochs, steps = train.get("epochs"), train.get("steps")
    if epochs is None or epochs.value is None or steps is None:
        return
    if not steps.origin.startswith("override"):
        return
    if epochs.origin.startswith("override"):
        rule = f"train.epochs = {epochs.value:g} ({epochs.origin}) and "
        rule += f"train.steps = {steps.value} ({steps.origin}) both say how long to train"
        raise ConfigError(refusal(rule, legal=["one of them"]))
    del train["epochs"]


def default_warmup(steps: int) -> int:
    """Return the warm-up of a schedule of so many steps: a tenth, at most 100."""
    return min(100, steps // 10)


def _derive(stated: dict[str, Values]) -> None:
    """Fill what follows from other keys: packing, tokenizer, model's sizes, rate, warm-up, hang."""
    data = stated["data"]
    if data.get("format", Value("text", "")).value == "chat":
        data.setdefault("packing", Value("documents", "derived from data.format"))
    init_from = stated["model"].get("init_from", Value(None, "")).value
    if init_from is not None and "tokenizer" not in data:
        for key, value in default_tokenizer(init_from).items():
            data.setdefault(key, value)
    source = data.get("source", Value("stdlib", "default")).value
    folder = Path(source) if isinstance(source, str) and Path(source).is_dir() else None
    tokenizer = data.get("tokenizer", Value("bytes", "default"))
    stated["model"] = resolve_model(stated["model"], tokenizer, folder)
    _derive_lora(stated["lora"])
    lora = _built("lora", LoraSection, stated["lora"])
    if lora.adapters is not None:
        stated["model"]["lora"] = Value(lora.adapters, "[lora]")
    model = _built("model", ModelSpec, stated["model"])
    if "lr" not in stated["optimizer"] and (rate := default_rate(model)) is not None:
        stated["optimizer"]["lr"] = rate
    for key, value in default_training(model, stated["cluster"], stated["train"]).items():
        stated["train"][key] = value
    if "warmup_steps" not in stated["optimizer"]:
        stated["optimizer"]["warmup_steps"] = _warmup(stated)
    cluster = stated["cluster"]
    timeout = cluster.get("timeout", Value(None, "")).value
    if isinstance(timeout, int | float) and "hang" not in cluster:
        cluster["hang"] = Value(timeout / 2, "derived: cluster.timeout / 2")


def _pin(stated: Mapping[str, Values]) -> None:
    """Pin ids of the Hub to the newest commit, so that a run and its resumption read the same."""
    for section, key in _OF_HUB:
        setting = stated[section].get(key)
        if setting is None or not isinstance(setting.value, str):
            continue
        try:
            stated[section][key] = setting._replace(value=hub.pinned(setting.value))
        except ConfigError as error:
            where = f"{section}.{key} = {setting.value!r} ({setting.origin})"
            raise ConfigError(f"{where}: {error}") from error


def _warmup(stated: Mapping[str, Values]) -> Value:
    """Return the warm-up of a schedule that states none."""
    steps = stated["optimizer"].get("schedule_steps", Value(None, "")).value
    if steps is not None:
        return Value(default_warmup(steps), "derived: optimizer.schedule_steps / 10, at most 100")
    steps = stated["train"].get("steps", Value(TrainSpec().steps, "default")).value
    return Value(default_warmup(steps), "derived: train.steps / 10, at most 100")


def _derive_lora(values: Values) -> None:
    """Fill keys from a folder of adapters; raises `ConfigError` where the config differs."""
    folder = values.get("init_from", Value(None, ""))
    if folder.value is None:
        return
    source = f"lora.init_from = {folder.value!r} ({folder.origin})"
    try:
        stated = read_adapter_config(hub.folder_of(folder.value))
    except MeshwrightError as error:
        raise type(error)(f"{source}: {error}") from error
    for key, value in stated.items():
        setting = values.setdefault(key, Value(value, folder.value))
        chosen = (
            (setting.value,)
            if key == "targets" and isinstance(setting.value, str)
            else setting.value
        )
        same = set(chosen) == set(value) if key == "targets" else chosen == value
        if not same and key != "dropout":
            rule = (
                f"lora.{key} = {shown(setting.value)} ({setting.origin}), but {source} has another"
            )
            raise ConfigError(refusal(rule, legal=[f"lora.{key} = {shown(value)}"]))


def _merge(stated: dict[str, Values], new: Iterable[tuple[str, str, Value]]) -> None:
    for section, key, value in new:
        _check_known(section, key, value.origin)
        stated[section][key] = value


def _check_known(section: str, key: str, origin: str) -> None:
    """Refuse a section or key that does not exist, with the nearest one that does."""
    if section not in SECTIONS:
        if section in _MISSING:
            raise ConfigError(refusal(f"section [{section}] ({origin})", hint=_INSTEAD))
        legal = [f"[{name}]" for name in nearest(section, SECTIONS) or SECTIONS]
        raise ConfigError(refusal(f"unknown section [{section}] ({origin})", legal=legal))
    known = KEYS[section]
    if key in known:
        return
    replacement, hint = instead_of(key)
    if replacement or hint:
        raise ConfigError(
            refusal(f"unknown key {section}.{key} ({origin})", legal=replacement, hint=hint)
        )
    close = [f"{section}.{name}" for name in nearest(key, known)]
    elsewhere = [f"{name}.{key}" for name, keys in KEYS.items() if key in keys]
    if not close and not elsewhere:
        all_keys = [f"{name}.{k}" for name, keys in KEYS.items() for k in keys]
        close = nearest(f"{section}.{key}", all_keys)
    legal = elsewhere or close
    raise ConfigError(refusal(f"unknown key {section}.{key} ({origin})", legal=legal))


def _read_toml(path: Path) -> list[tuple[str, str, Value]]:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        rule = f"config file {path} cannot be read: {reason}"
        raise ConfigError(refusal(rule, legal=_neighbours(path))) from None
    try:
        content = parse_toml(text)
    except ValueError as error:
        reason = str(error).replace("Cannot overwrite a value", "a key is there twice")
        raise ConfigError(f"config file {path} is not valid TOML: {reason}") from None
    lines = _key_lines(text)
    entries = []
    for section, values in content.items():
        origin = f"{path.name}:{lines.get((section, ''), lines.get(('', section), 1))}"
        if not isinstance(values, dict):
            raise ConfigError(
                f"{section} = {values!r} ({origin}) is outside of any section; "
                f"sections are {', '.join(f'[{name}]' for name in SECTIONS)}"
            )
        if section not in SECTIONS:
            _check_known(section, "", origin)
        for key, value in values.items():
            line = lines.get((section, key))
            entries.append((section, key, Value(value, f"{path.name}:{line}" if line else origin)))
    return entries


def _neighbours(path: Path) -> list[str]:
    """Return the config beside a path that does not exist whose name is nearest to its own."""
    if path.exists():
        return []
    with contextlib.suppress(OSError):
        names = [file.name for file in path.parent.glob("*.toml") if file.is_file()]
        return [str(path.with_name(name)) for name in nearest(path.name, names)]
    return []


def _key_lines(text: str) -> dict[tuple[str, str], int]:
    """Return the line of each `(section, key)`, and of each section as `(section, "")`.

    tomllib keeps no positions; this only serves messages, so a key in an exotic spelling merely
    falls back to its section's line.
    """
    lines: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([\w.\"-]+)\s*\]+", line):
            names = header[1].replace('"', "").split(".")
            section = names[0]
            lines.setdefault((section, ".".join(names[1:2])), number)
        elif key := re.match(r"\s*([\w\"-]+)(?:\.([\w\"-]+))?[\w.\"\s-]*=", line):
            first, second = key[1].strip('"'), (key[2] or "").strip('"')
            entry = (section, first) if section or not second else (first, second)
            lines.setdefault(entry, number)
    return lines


def _read_overrides(overrides: Iterable[str]) -> list[tuple[str, str, Value]]:
    entries = []
    for text in overrides:
        name, equals, written = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"override {text!r} is not of the form section.key=value")
        entries.append(_read_key(name, _parse(written), f"override {text}"))
    return entries


def _read_key(name: str, value: Any, origin: str) -> tuple[str, str, Value]:
    """Return the section, the key and the value of `section.key` or an alias."""
    if name == _MODEL and isinstance(value, str):
        is_stored = Path(value).is_dir() or hub.is_model(value)
        name = "model.init_from" if is_stored else "model.preset"
    if "." not in name:
        if name not in ALIASES:
            all_keys = [f"{s}.{k}" for s, keys in KEYS.items() for k in keys]
            legal = [k for k in all_keys if k.split(".")[1] == name]
            replacements, hint = instead_of(name)
            if not (legal := legal or replacements) and not hint:
                legal = nearest(name, ALIASES) or nearest(name, all_keys, 2)
            if len(legal) == 1:
                legal = [ELSEWHERE.get((legal[0], value), legal[0])]
            raise ConfigError(refusal(f"unknown name {name} ({origin})", legal=legal, hint=hint))
        name, value = _expand(name, value, origin)
    section, key = name.split(".", 1)
    return section, key, Value(value, origin)


def _expand(name: str, value: Any, origin: str) -> tuple[str, Any]:
    """Return the key and value that an alias stands for."""
    alias = ALIASES[name]
    if alias.values is None:
        return alias.key, value
    accepted = {spelled.lower(): meaning for spelled, meaning in alias.values.items()}
    spelled = str(value).lower()
    if spelled not in accepted:
        raise ConfigError(refusal(f"{name} = {value} ({origin})", legal=list(alias.values)))
    return alias.key, accepted[spelled]


def _parse(written: str) -> Any:
    """Return an override's value: TOML where it parses as such, `True`/`False`, else the text."""
    if written in ("True", "False"):
        return written == "True"
    try:
        return parse_toml(f"value = {written}")["value"]
    except ValueError:
        return written


def _word(error: ErrorDetails, section: str, values: Values) -> str:
    """Word one pydantic error: the key, its value, where it was written, and the rule."""
    if not error["loc"]:
        return str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
    key = str(error["loc"][0])
    setting = values.get(key)
    where = f" ({setting.origin})" if setting else ""
    field = SECTIONS[section].model_fields.get(key)
    tables = list(tables_in(field.annotation)) if field else []
    is_inside = bool(tables) and any(isinstance(place, str) for place in error["loc"][1:])
    if setting and field and is_of_kind(error):
        kind = kind_of(field.annotation)
        if not is_inside:
            message = f"{section}.{key} = {shown(setting.value)}{where} must be {kind}"
            return refusal(message, legal=meant(f"{section}.{key}", setting.value, field))
    name = ".".join([section, *map(str, error["loc"])])
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "extra_forbidden":
        known = [inner for table in tables for inner in table.model_fields]
        legal = nearest(str(error["loc"][-1]), known)
        return refusal(
            f"unknown key {name} ({setting.origin if setting else 'default'})", legal=legal
        )
    if error["type"] == "value_error" and "ctx" in error:
        return str(error["ctx"]["error"])
    rule = error["msg"][0].lower() + error["msg"][1:]
    rule = rule.replace("input should be a valid", "must be a").replace(
        "input should be", "must be"
    )
    is_value = len(error["loc"]) == 1
    legal = within(name, error, SECTIONS[section].model_fields[key]) if is_value else []
    return refusal(f"{name} = {shown(error['input'])}{where} {rule}", legal=legal)


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file; every key is optional in a file."""
    schema = Config.model_json_schema()
    schema["title"] = "Meshwright config"
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("required", None)
    schema["properties"].pop("origins", None)
    schema["$defs"]["ModelSpec"]["properties"].pop(OF_SECTION[1])
    return schema
