"""Converts `train.epochs` to steps, and computes how often a run reads its training data."""

from __future__ import annotations

import math

from meshwright.data import BlendSampler, Dataset, StreamedDataset
from meshwright.errors import ConfigError, refusal
from meshwright.spec.loading import Config, default_warmup
from meshwright.spec.parts import parameter_count, trained_parameter_count
from meshwright.units import counted, format_count


def with_epochs(config: Config, dataset: Dataset | StreamedDataset) -> Config:
    """Return a config with the number of steps that reads the data `train.epochs` times.

    Returns it unchanged if `train.epochs` is not set. Raises `ConfigError` for streamed data and
    for sources drawn by weight, which have no epochs.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config
    samples = samples_of_epoch(config, dataset)
    if samples is None:
        kind = "a stream" if config.data.streaming else "a blend of sources by weight"
        rule = f"train.epochs = {epochs:g}, but {kind} has no epochs"
        raise ConfigError(refusal(rule, legal=["train.steps=N"]))
    steps = max(1, math.ceil(epochs * samples / config.train.batch))
    changes: dict[str, object] = {"train": config.train.model_copy(update={"steps": steps})}
    origins = {
        **config.origins,
        "train.steps": f"derived: train.epochs of {samples} samples each",
    }
    is_derived = config.origins.get("optimizer.warmup_steps", "").startswith("derived: train.steps")
    if is_derived:
        warmup = {"warmup_steps": default_warmup(steps)}
        changes["optimizer"] = config.optimizer.model_copy(update=warmup)
    return config.model_copy(update={**changes, "origins": origins})


def samples_of_epoch(config: Config, dataset: Dataset | StreamedDataset) -> int | None:
    """Return the samples in an epoch; None for a stream or for sources drawn by weight."""
    if isinstance(dataset, StreamedDataset):
        return None
    sampler = dataset.sampler("train", config.train.seq_len, config.train.batch)
    return None if isinstance(sampler, BlendSampler) else sampler.samples


def fine_tuning_words(config: Config, dataset: Dataset | StreamedDataset) -> str | None:
    """Return a line on a fine-tuning run's trained parameters and epochs; None for pretraining."""
    model, train = config.model, config.train
    if model.init_from is None and model.lora is None:
        return None
    total, trained = parameter_count(model), trained_parameter_count(model)
    share = "all" if trained == total else format_count(trained)
    text = f"fine-tuning: {share} of {format_count(total)} parameters trainable"
    samples = samples_of_epoch(config, dataset)
    if samples is None:
        return text
    epochs = train.steps * train.batch / samples
    return f"{text}, {epochs:.3g} epochs in {counted(train.steps, 'step')}"
