"""Sentences about a config that several rooms say."""

from __future__ import annotations

from meshwright.spec.model import ModelSpec


def beyond_context(seq_len: int, model: ModelSpec) -> str | None:
    """Return what is to be said of sequences that are longer than a model is meant for."""
    if seq_len <= model.context:
        return None
    return (
        f"train.seq_len = {seq_len} is beyond model.context = {model.context}: a trained model "
        "wants its rope_theta or rope_scaling changed for that"
    )
