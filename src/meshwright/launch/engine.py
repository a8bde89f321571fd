"""What `train.engine` asks of a layout and of what is installed."""

from __future__ import annotations

import importlib.util

from meshwright.errors import ConfigError, refusal
from meshwright.layout import Layout
from meshwright.spec.loading import Config


def check_engine(config: Config, layout: Layout, *, resumes: bool) -> None:
    """Refuse what DeepSpeed's engine does not do here, and the engine where it is missing."""
    train = config.train
    if train.engine == "native":
        return
    wrong = {
        "layout.pp": (layout.pp, 1),
        "layout.cp": (layout.cp, 1),
        "layout.tp": (layout.tp, 1),
        "layout.zero": (layout.zero, min(layout.zero, 2)),
        "layout.offload": (layout.offload, "none"),
        "data.streaming": (config.data.streaming, False),
        "train.compile": (train.is_compiled, False),
        "train.check_every": (train.check_every, 0),
        "train.precision": (
            train.precision,
            "bf16" if train.precision == "fp16" else train.precision,
        ),
    }
    if layout.dp_shard > 1:
        wrong["layout.dp_replicate"] = (layout.dp_replicate, 1)
    for key, (value, legal) in wrong.items():
        if value != legal:
            rule = f'train.engine = "deepspeed" does not go with {key} = {value}'
            raise ConfigError(refusal(rule, legal=[f"{key} = {legal}", 'train.engine = "native"']))
    if resumes:
        raise ConfigError('--resume: train.engine = "deepspeed" keeps no state to go on from')
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "train.engine is set, but deepspeed is not installed: pip install "
            "'meshwright[deepspeed]'"
        )
