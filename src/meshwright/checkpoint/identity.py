"""What must stay the same when a run is resumed, and the refusal otherwise. No torch here.

A run resumed with other data, or another model, would continue with a loss that looks normal.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from meshwright.checkpoint.commit import digest_of
from meshwright.errors import CheckpointError, ConfigError, refusal
from meshwright.spec.loading import Config
from meshwright.spec.model import unpadded

# Each is a part of a run's identity, and what --allow-changed takes.
PARTS: Final = (
    "run",
    "model",
    "optimizer",
    "tokenizer",
    "data",
    "weights",
    "validation",
    "packing",
    "seed",
    "train.seed",
    "train.batch",
    "train.seq_len",
)


def identity_of(config: Config, data: Mapping[str, str]) -> dict[str, str]:
    """Return a run's identity: what must not change on resumption, as a value or hash by name.

    The names are those of `PARTS`. `data` has the entries of the data set.
    """
    model, train = unpadded(config.model).identity(), config.train
    del model["init_from"]
    return {
        "model": digest_of([json.dumps(model, sort_keys=True)]),
        "optimizer": config.optimizer.name,
        **data,
        "train.seed": str(train.seed),
        "train.batch": str(train.batch),
        "train.seq_len": str(train.seq_len),
    }


def refuse_changed(
    manifest: Mapping[str, Any],
    identity: Mapping[str, str],
    run: str,
    allowed: Collection[str],
    descriptions: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise `CheckpointError` if the resumed run's identity differs from that of the saved step.

    `identity` and `run` (its id) are the resumed run's; names in `allowed` may differ. The message
    lists each difference with both values and the flag that allows it; `descriptions` replaces the
    text for some names.
    """
    stored = manifest.get("identity")
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"step {manifest.get('step')} holds weights only, no run to continue")
    stored = {**stored, "run": manifest.get("run", "")}
    identity = {**identity, "run": run}
    all_parts = dict.fromkeys([*identity, *stored])
    changed = [
        part for part in all_parts if stored.get(part) != identity.get(part) and part not in allowed
    ]
    if changed:
        pairs = [
            descriptions.get(part)
            or f"{part} was {stored.get(part)!s:.16}, is {identity.get(part)!s:.16}"
            for part in changed
        ]
        raise CheckpointError(
            f"step {manifest.get('step')} was written by another run: {'; '.join(pairs)}. "
            f"To continue all the same: --allow-changed {','.join(changed)}"
        )


def check_parts(allowed: Collection[str]) -> None:
    """Raise `ConfigError` if a name in `allowed` (of --allow-changed) is not one of `PARTS`."""
    for part in allowed:
        if part not in PARTS:
            raise ConfigError(refusal(f"--allow-changed {part}: no such part", legal=PARTS))
