"""Resolves a user's settings to complete specs: presets, family rules and derived sizes.

Every function takes and returns `Values`: the value of each key together with its origin, so that
nothing is filled in without a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ConfigError, MeshwrightError, nearest, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.kinds import shown
from meshwright.spec.model import VOCAB_MULTIPLE, ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.stored import read_object, stored_spec
from meshwright.units import round_up

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
    if family is not None:  # else the spec refuses it
        for key, value in {**family.features, **family.defaults}.items():
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
            spec, origin = stored_spec(Path(init_from.value))
        except MeshwrightError as error:
            setting = f"model.init_from = {init_from.value!r} ({init_from.origin})"
            raise type(error)(f"{setting}: {error}") from error
        fields = spec.model_dump(exclude={"preset", "init_from", "lora"})
        return [{key: Value(value, str(origin)) for key, value in fields.items()}]
    named = section.get("preset", Value(None, ""))
    name = "demo" if named.value is None else named.value
    if name not in PRESETS:
        legal = nearest(str(name).rpartition("/")[2].lower(), PRESETS, 3) or sorted(PRESETS)
        hint = "A model that is no preset: download it, and give model.init_from=FOLDER"
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
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.parent.is_dir() and not path.is_file() and Path(name).is_dir():
        raise ConfigError(lacks_tokenizer_json(Path(name), f"data.tokenizer = {name!r} ({origin})"))
    if not path.is_file():
        legal = ["'bytes'", "'gpt2'", "the path of a tokenizer.json"]
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
