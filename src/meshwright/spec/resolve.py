"""Resolves a user's settings to complete specs: presets, family rules, derived sizes, defaults.

Every function takes and returns `Values`: the value of each key together with its origin, so that
nothing is filled in without a reason. Rate, batch, length, precision and tokenizer have defaults
that depend on model and device.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.errors import ConfigError, MeshwrightError, nearest, refusal
from meshwright.spec import hub
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import OF_EXPERTS
from meshwright.spec.kinds import shown
from meshwright.spec.model import VOCAB_MULTIPLE, ModelSpec
from meshwright.spec.parts import parameter_count
from meshwright.spec.presets import LOCAL, PRESETS
from meshwright.spec.stored import read_object, stored_spec, stored_tokenizer
from meshwright.spec.training import OptimizerSpec
from meshwright.units import format_count, round_up

# Learning rates by parameters: ours of small models, then GPT-3's, arXiv:2005.14165, table 2.1.
_RATES: Final = (
    (1e7, OptimizerSpec().lr),
    (1.25e8, 6e-4),
    (3.5e8, 3e-4),
    (7.6e8, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (1.3e10, 1e-4),
    (1.75e11, 6e-5),
)
# Tokens of a batch by parameters: powers of two near those of the same table.
_BATCHES: Final = ((0.0, 1 << 19), (1.3e9, 1 << 20), (6.7e9, 1 << 21), (1e11, 1 << 22))
# The longest default: pretraining uses longer sequences only towards its end.
_LONGEST: Final = 8192
# GPUs without bf16 units, Volta and Turing, as the catalogue or their driver calls them.
_HALF: Final = re.compile(r"v100|titan v\b|\bt4\b|rtx 20\d\d|quadro rtx|gtx 16", re.IGNORECASE)
# Share of the rate that a model takes which is trained already.
_TRAINED: Final = 0.1


def rate_for(parameters: float) -> float:
    """Return the peak learning rate for a model trained from scratch, to two digits.

    Interpolated between the sizes of the table in logarithms.
    """
    if parameters <= _RATES[0][0]:
        return _RATES[0][1]
    for (small, high), (large, low) in itertools.pairwise(_RATES):
        if parameters <= large:
            share = math.log(parameters / small) / math.log(large / small)
            return float(f"{high * (low / high) ** share:.1e}")
    return _RATES[-1][1]


def default_rate(model: ModelSpec) -> Value | None:
    """Return the default learning rate for a model; None: `OptimizerSpec`'s.

    Adapters use ten times the rate of full training, whatever their rank: "LoRA Without Regret",
    doi.org/10.64434/tml.20250929.
    """
    count = parameter_count(model)
    size, rate = f"{format_count(count)} parameters", rate_for(count)
    if model.init_from is not None and model.lora is None:
        origin = f"derived: a tenth of the rate for {size} from scratch: model.init_from is trained"
        return Value(float(f"{_TRAINED * rate:.1e}"), origin)
    if rate == OptimizerSpec().lr:
        return None
    return Value(rate, f"derived: for {size}")


def default_precision(device: str) -> Value:
    """Return the default precision of a GPU, by its catalogue or driver name."""
    name = "fp16" if _HALF.search(device) else "bf16"
    return Value(name, f"derived: the fastest precision for matmuls on {device}")


def default_training(model: ModelSpec, cluster: Values, train: Values) -> Values:
    """Return the default batch, length and precision on a cluster of the catalogue.

    `train` is the [train] section, whose keys stay. Empty for this machine, which is not examined
    here; for Meshwright's default model only the precision, because its other defaults are for a
    first try.
    """
    device = str(cluster.get("preset", Value(LOCAL, "")).value)
    if device in (LOCAL, "cpu"):
        return {}
    defaults = {"precision": default_precision(device)}
    if model.preset not in (None, "demo") or model.init_from is not None:
        defaults |= _default_batch(model, train)
    return {key: value for key, value in defaults.items() if key not in train}


def _default_batch(model: ModelSpec, train: Values) -> Values:
    count = parameter_count(model)
    length = Value(min(model.context, _LONGEST), "derived: model.context, up to 8192")
    tokens = next(size for threshold, size in reversed(_BATCHES) if count >= threshold)
    sequences = max(1, tokens // int(train.get("seq_len", length).value))
    origin = f"derived: {format_count(tokens)} tokens for {format_count(count)} parameters"
    # A power of two, which devices divide.
    return {"seq_len": length, "batch": Value(1 << (sequences.bit_length() - 1), origin)}


def default_tokenizer(init_from: str) -> Values:
    """Return the keys of [data] that set the tokenizer of a stored model."""
    tokenizer = stored_tokenizer(hub.folder_of(init_from))
    if tokenizer is None:
        return {}
    origin = f"model.init_from {init_from}"
    is_hub = hub.hub_id(init_from) is not None
    keys: dict[str, object] = {"tokenizer": init_from if is_hub else tokenizer.name}
    if tokenizer.eos is not None:
        keys["eos"] = tokenizer.eos
    if tokenizer.bos is not None:
        keys["bos"] = bool(tokenizer.bos)
    return {key: Value(value, origin) for key, value in keys.items()}


# What is decided by the loss on the held-out split, by section and key.
_BY_HELD_OUT = (("train", "stop_after_evals"), ("checkpoint", "keep_best"))
BUILTIN_VOCAB = {"bytes": 257, "gpt2": 50257}


class Value(NamedTuple):
    """A value and where it came from: `default`, `run.toml:12`, `override`, `preset NAME`, ..."""

    value: Any
    origin: str


Values = dict[str, Value]


def model_spec(**fields: Any) -> ModelSpec:
    """Return the complete `ModelSpec` of a preset and/or some sizes, as the [model] section does.

    Raises `ConfigError` for an unknown preset, `pydantic.ValidationError` for a broken rule.
    """
    section = {key: Value(value, "argument") for key, value in fields.items()}
    resolved = resolve_model(section, tokenizer=Value("bytes", "default"), source=None)
    return ModelSpec(**{key: value.value for key, value in resolved.items()})


def check_held_out(sections: Mapping[str, Values]) -> None:
    """Refuse settings that need the held-out loss if nothing is evaluated."""
    if sections["train"].get("eval_every", Value(0, "default")).value:
        return
    for section, key in _BY_HELD_OUT:
        setting = sections[section].get(key, Value(0, "default"))
        if setting.value:
            rule = (
                f"{section}.{key} = {shown(setting.value)} ({setting.origin}) needs the held-out "
            )
            legal = ["train.eval_every = 10", f"{section}.{key} = {shown(type(setting.value)())}"]
            raise ConfigError(refusal(f"{rule}loss, but train.eval_every = 0", legal=legal))


def resolve_model(section: Values, tokenizer: Value, source: Path | None) -> Values:
    """Complete the [model] section from its preset or a model folder, the family and the tokenizer.

    `source` is the first data source where it is a folder: an indexed store brings its tokenizer.
    """
    values: Values = dict(section)
    for base in _bases(section):
        for key, value in base.items():
            values.setdefault(key, value)
    family = FAMILIES.get(values.setdefault("family", Value("llama", "default")).value)
    if values.get("planned", Value(None, "")).value is not None:
        family = None  # all features are its own
    if family is not None:  # else the spec refuses it
        is_dense = values.get("experts", Value(1, "")).value == 0 and family.can_be_dense
        for key, value in {**family.features, **family.defaults}.items():
            if is_dense and key in OF_EXPERTS:
                continue
            if value != ModelSpec.model_fields[key].default:
                values.setdefault(key, Value(value, f"default of the {family.name} family"))
    is_gated = values.get("gated_mlp", Value(True, "")).value
    parts = () if family is None else family.head_dim_parts
    if parts and values.get("head_dim", Value(None, "")).value is None:
        total = sum(values[part].value for part in parts)
        formula = " + ".join(f"model.{part}" for part in parts)
        values["head_dim"] = Value(total, f"derived from {formula}")
    _derive_sizes(values, is_gated=is_gated)
    if family is not None:
        for key, derived in family.of_width(values["dim"].value).items():
            values.setdefault(key, Value(derived, f"derived from model.dim: {family.name}"))
    if values.get("vocab_size", Value(None, "")).value is None:
        values["vocab_size"] = _vocab_size(tokenizer, source)
    return values


def _bases(section: Values) -> list[Values]:
    """Return the values of keys that were not given: a stored model's, a preset's or the demo's."""
    init_from = section.get("init_from")
    if init_from is not None and init_from.value is not None:
        try:
            spec, origin = stored_spec(hub.folder_of(init_from.value), plans=True)
        except MeshwrightError as error:
            setting = f"model.init_from = {init_from.value!r} ({init_from.origin})"
            raise type(error)(f"{setting}: {error}") from error
        fields = spec.model_dump(exclude={"preset", "init_from", "lora"})
        return [{key: Value(value, str(origin)) for key, value in fields.items()}]
    named = section.get("preset", Value(None, ""))
    name = "demo" if named.value is None else named.value
    if name not in PRESETS:
        legal = nearest(str(name).rpartition("/")[2].lower(), PRESETS, 3) or sorted(PRESETS)
        hint = f"A model that is not a preset: model.init_from={name}, or the folder of a download"
        rule = f"model.preset = {name!r} ({named.origin}) is not known"
        raise ConfigError(refusal(rule, legal=legal, hint=hint if "/" in str(name) else ""))
    base = {key: Value(value, f"preset {name}") for key, value in PRESETS[name].items()}
    if named.value is None:
        base = {key: Value(value.value, "default") for key, value in base.items()}
        base["preset"] = Value(None, "default")
        if "n_heads" in section:  # the default's own head count no longer limits the groups
            base.pop("n_kv_heads")
        family = FAMILIES.get(section.get("family", Value("llama", "")).value)
        if family is not None and not family.grouped:
            base.pop("n_kv_heads", None)
    return [base]


def _derive_sizes(values: Values, *, is_gated: bool) -> None:
    """Fill `n_kv_heads`, `head_dim`, `ffn_dim` and `context` from the sizes beside them."""
    dim, heads = values["dim"].value, values["n_heads"].value
    groups = max(values.get("n_kv_heads", Value(1, "")).value, 1)
    values.setdefault("n_kv_heads", Value(heads, "derived from model.n_heads"))
    if values.get("head_dim", Value(None, "")).value is None:
        if dim % heads:
            rule = f"model.n_heads = {heads} ({values['n_heads'].origin}) must divide "
            rule += f"model.dim = {dim} ({values['dim'].origin})"
            legal = [f"model.n_heads = {n}" for n in _head_counts(dim, heads, groups)]
            near = max(round(dim / (2 * heads)), 1) * 2 * heads
            raise ConfigError(refusal(rule, legal=[*legal, f"model.dim = {near}"]))
        values["head_dim"] = Value(dim // heads, "derived from model.dim / model.n_heads")
    if values.get("ffn_dim", Value(None, "")).value is None:
        if is_gated:  # 2/3 of 4 x dim, as SwiGLU has a third matrix: arXiv:2002.05202
            ffn, origin = round_up(8 * dim // 3, 64), "derived: 8/3 model.dim in multiples of 64"
        else:
            ffn, origin = 4 * dim, "derived: 4 model.dim"
        values["ffn_dim"] = Value(ffn, origin)
    values.setdefault("context", Value(2048, "default"))


def _head_counts(dim: int, near: int, groups: int) -> list[int]:
    """Return the two legal head counts nearest to `near`, if there are any.

    They give an even head size, and are multiples of the number of key/value heads.
    """
    legal = [n for n in range(groups, dim // 2 + 1, groups) if dim % (2 * n) == 0]
    return sorted(sorted(legal, key=lambda n: (abs(n - near), n))[:2])


def _vocab_size(tokenizer: Value, source: Path | None) -> Value:
    """Return the tokenizer's vocabulary rounded up, so that it can be sharded."""
    name, where = str(tokenizer.value), f"data.tokenizer {tokenizer.value}"
    manifest = source / "manifest.json" if source is not None else None
    if manifest is not None and manifest.is_file():
        size, where = int(read_object(manifest).get("vocab_size", 0)), f"store {source}"
    elif name in BUILTIN_VOCAB:
        size = BUILTIN_VOCAB[name]
    else:
        size = tokenizer_json_size(_tokenizer_file(name, tokenizer.origin))
    if size <= 0:
        raise ConfigError(f"{where} states no vocabulary; set model.vocab_size")
    rounded = round_up(size, VOCAB_MULTIPLE)
    return Value(rounded, f"{where} ({size}) in multiples of {VOCAB_MULTIPLE}")


def _tokenizer_file(name: str, origin: str) -> Path:
    folder = path = hub.folder_of(name)
    if folder.is_dir():
        path = folder / "tokenizer.json"
        if not path.is_file():
            asked = f"data.tokenizer = {name!r} ({origin})"
            raise ConfigError(lacks_tokenizer_json(folder, asked))
    if not path.is_file():
        legal = ["'bytes'", "'gpt2'", "the path of a tokenizer.json", "a Hub id"]
        raise ConfigError(
            refusal(f"data.tokenizer = {name!r} ({origin}): no such file", legal=legal)
        )
    return path


def lacks_tokenizer_json(folder: Path, asked: str = "the tokenizer") -> str:
    """Return the refusal of a folder without a tokenizer.json, with the files that are there."""
    files = sorted(file.name for file in folder.iterdir() if "tok" in file.name.lower())
    present = f", only {', '.join(files[:3])}" if files else ""
    return refusal(
        f"{asked}: {folder} has no tokenizer.json{present}",
        hint=(
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OUT) of transformers writes one "
            "from the tokenizer's other files"
        ),
    )


def tokenizer_json_size(path: Path) -> int:
    """Return the largest id of a Hugging Face `tokenizer.json`, plus one."""
    content = read_object(path)
    vocab = (content.get("model") or {}).get("vocab") or {}
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in content.get("added_tokens") or []]
    return 1 + max(ids, default=-1)
