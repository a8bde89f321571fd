"""Sentences about a config or a machine that several packages print."""

from __future__ import annotations

from typing import Final

from meshwright.spec.loading import Config
from meshwright.spec.model import ModelSpec, padded

# What a reader of a plan should know of the program that is to train it.
HAS_RUN: Final = (
    "What has run: every layout of the tests, on CPU ranks that talk by gloo, and layouts of one "
    "device on one H100 and one H200. Nothing has run on several GPUs yet; what is said of those "
    "is computed from measurements that others published."
)


def busy(load: float, cores: int) -> str | None:
    """Return a warning if a machine's load is high: one rank that is slowed slows all."""
    if load <= cores / 2:
        return None
    return f"{load:.1f} on {cores} cores; other processes take time from the ranks"


def vocabulary_padding(model: ModelSpec, tp: int) -> str | None:
    """Return what is added to the vocabulary on so many ranks of tp, if anything is."""
    model = padded(model, tp)
    rows, size = model.vocab_rows, model.vocab_size
    if rows == size:
        return None
    return (
        f"{size:,} entries padded to {rows:,} rows, a multiple of {model.pad_vocab_to_multiple_of} "
        "(model.pad_vocab_to_multiple_of); padding is never predicted, saved or exported"
    )


def beyond_context(seq_len: int, model: ModelSpec) -> str | None:
    """Return a note if sequences are longer than the model's context."""
    if seq_len <= model.context:
        return None
    return (
        f"train.seq_len = {seq_len} is beyond model.context = {model.context}: a trained model "
        "wants its rope_theta or rope_scaling changed for that"
    )


def is_default_corpus(config: Config) -> bool:
    """Whether nobody has named the data, so that the built-in corpus is trained on."""
    return config.origins.get("data.source") == "default"


def unnamed_inputs(config: Config) -> list[str]:
    """Return notes on weights and data that nobody has named, of a config to be trained."""
    notes = []
    model, tokenizer = config.model, config.data.tokenizer
    if model.preset is not None and model.init_from is None:
        notes.append(
            f"RANDOM WEIGHTS: model.preset = {model.preset} gives sizes alone; "
            "model.init_from=FOLDER, or owner/name of the Hub, starts from trained weights"
        )
    if is_default_corpus(config):
        notes.append(
            f"BUILT-IN DATA: Python's standard library, tokenized by {tokenizer!r}; set "
            "data.source and data.tokenizer to train on yours"
        )
    elif model.preset is not None and config.origins.get("data.tokenizer") == "default":
        notes.append(
            f"data.tokenizer = {tokenizer!r} is the default, which is not the tokenizer of "
            f"model.preset = {model.preset}"
        )
    return notes
