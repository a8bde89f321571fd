"""Scalings of rotation, and models that layers of several kinds make up."""

import pytest

from meshwright.spec.resolve import model_spec

SIZES = {"vocab_size": 96, "dim": 96, "n_layers": 2, "n_heads": 4, "context": 640}  # 12 pairs
SHORT = [1.0 + i / 20 for i in range(12)]
LONG = [1.0 + i * i / 9 for i in range(12)]
YARNS = {
    "plain": {"factor": 4.0, "original_context": 160},
    "real bounds": {"factor": 3.7, "original_context": 100, "truncate": False},
    "mscale": {
        "factor": 40.0,
        "original_context": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 7.5,
        "beta_slow": 2.0,
    },
    "one mscale": {"factor": 8.0, "original_context": 300, "mscale": 0.7},
    "shrinks": {"factor": 0.5, "original_context": 20},
    "nothing turns once": {"factor": 4.0, "original_context": 3},
    "given": {"factor": 8.0, "original_context": 64, "attention_factor": 1.7, "mscale": 2.0},
    "equal bounds": {"factor": 8.0, "original_context": 64, "beta_fast": 2.0, "beta_slow": 2.0},
}
LONGROPES = {
    "plain": {"factor": 4.0, "original_context": 160},
    "shrinks": {"factor": 0.5, "original_context": 20},
    "given": {"factor": 8.0, "original_context": 64, "attention_factor": 1.7},
}
SCALINGS = [
    *(pytest.param("yarn", keys, id=f"yarn {name}") for name, keys in YARNS.items()),
    *(
        pytest.param(
            "longrope", keys | {"short_factor": SHORT, "long_factor": LONG}, id=f"longrope {name}"
        )
        for name, keys in LONGROPES.items()
    ),
]


def longrope(original=24, **more):
    scaling = {"kind": "longrope", "factor": 4.0, "original_context": original}
    return scaling | {"short_factor": SHORT, "long_factor": LONG} | more


# Layers of several kinds. No family here chooses a pattern of them by itself.
def patterned(*layers, **more):
    spec = model_spec(**SIZES | {"n_layers": 6}, init_std=0.2, **more)
    return spec.model_copy(update={"layer_pattern": layers})
