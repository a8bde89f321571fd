"""Defaults that depend on model and device: rate, batch, length, precision, tokenizer."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Final

from meshwright.spec.catalogue import LOCAL
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parameter_count
from meshwright.spec.resolve import Value, Values
from meshwright.spec.stored import stored_tokenizer
from meshwright.spec.training import OptimizerSpec
from meshwright.units import format_count

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
    tokenizer = stored_tokenizer(Path(init_from))
    if tokenizer is None:
        return {}
    origin = f"model.init_from {init_from}"
    keys: dict[str, object] = {"tokenizer": tokenizer.name}
    if tokenizer.eos is not None:
        keys["eos"] = tokenizer.eos
    if tokenizer.bos is not None:
        keys["bos"] = bool(tokenizer.bos)
    return {key: Value(value, origin) for key, value in keys.items()}
