"""Notes before a run starts, on settings that are legal but may not be intended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from filecmp import cmp
from operator import attrgetter
from pathlib import Path

from meshwright.checkpoint.commit import steps
from meshwright.errors import CheckpointError, ConfigError, refusal
from meshwright.layout import Layout, Machine, left_over, unsharded
from meshwright.program.optimizer import saved_bytes
from meshwright.program.target import takes_tf32
from meshwright.runtime.machines.machine import find_gpus, unused_note
from meshwright.spec import hub
from meshwright.spec.learning_rate import learning_rate
from meshwright.spec.loading import Config, load_config
from meshwright.spec.stored import stored_tokenizer
from meshwright.spec.words import beyond_context, unnamed_inputs, vocabulary_padding
from meshwright.store import Place, StorePath
from meshwright.training.run_folder import Job
from meshwright.units import format_bytes


def check_room(config: Config, root: Place, *, for_all: bool = False) -> str:
    """Return a line on the disk space that saved steps need and what is free on the disk of `root`.

    Of an object store, no limit is known. Raises `ConfigError` if a single step does not fit; with
    `for_all`, if all kept steps do not.
    """
    step = saved_bytes(config.model, config.train, config.optimizer)
    # The newest is there before the oldest goes.
    count = config.checkpoint.keep + config.checkpoint.keep_best + 1
    text = f"{count} steps of {format_bytes(step)} need {format_bytes(step * count)}"
    if isinstance(root, StorePath):
        return f"{text} in {root}"
    free = shutil.disk_usage(nearest_folder(root)).free
    text = f"{text}; {format_bytes(free)} are free"
    if free < (step * count if for_all else step):
        hint = "checkpoint.dir or log.dir sets where"
        raise ConfigError(refusal(f"{root} has no room for the run's steps: {text}", hint=hint))
    return text


def nearest_folder(path: Path) -> Path:
    """Return the path if it is an existing folder, else its nearest existing parent."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


# What a resumed run may change of how it trains: keys of the schedule, and others by section.
_OF_SCHEDULE = ("lr", "schedule", "warmup_steps", "decay_steps", "min_lr_ratio", "schedule_steps")
_OF_STEPS = {
    "optimizer": (
        *("betas", "eps", "weight_decay", "groups", "momentum", "state_dtype", "rounding"),
        *("nesterov", "ns_steps", "ns_precision", "scale"),
    ),
    "train": ("precision", "fp8", "loss_scale", "reduce_dtype", "master", "clip_norm", "nonfinite"),
}


def config_notes(config: Config) -> Iterator[str]:
    """Yield notes on a config that apply on any machine."""
    yield from unnamed_inputs(config)
    rate, where = config.optimizer.lr, config.origins.get("optimizer.lr", "")
    if where.startswith("derived"):
        yield f"optimizer.lr = {rate:g}, {where}"
    if config.origins.get("data.tokenizer", "").startswith("model.init_from"):
        yield f"data.tokenizer = {config.data.tokenizer}, as model.init_from has it"
    for key in ("train.batch", "train.seq_len", "train.precision", "layout.microbatch"):
        if (where := config.origins.get(key, "")).startswith("derived"):
            yield f"{key} = {attrgetter(key)(config)}, {where}"
    beyond = beyond_context(config.train.seq_len, config.model)
    for text in (preset_note(config), tokenizer_note(config), beyond, schedule_note(config)):
        if text is not None:
            yield text


# Keys of the model whose value makes it another one than its preset.
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")


def plan_notes(config: Config) -> list[str]:
    """Return the notes to print with a plan: whether model sizes differ from the preset's."""
    note = preset_note(config)
    return [] if note is None else [note]


def preset_note(config: Config) -> str | None:
    """Return a note if model sizes in the config differ from those of its preset, else None."""
    of_preset = ("preset ", "derived", "default", "data.tokenizer")
    origins = {key: config.origins[f"model.{key}"] for key in _SIZES}
    given = [
        f"model.{key} = {getattr(config.model, key)} ({where})"
        for key, where in origins.items()
        if not where.startswith(of_preset)
    ]
    if config.model.preset is None or not given:
        return None
    return f"not the whole of model.preset = {config.model.preset}: {', '.join(given)}"


def schedule_note(config: Config) -> str | None:
    """Return a note if the learning rate never reaches `optimizer.lr` or drops after warm-up.

    None if neither is the case.
    """
    spec, steps = config.optimizer, config.train.steps
    end, warmup = spec.schedule_steps or steps, spec.warmup_steps
    if warmup > min(end, steps):
        return (
            f"optimizer.warmup_steps = {warmup} is more than the {min(end, steps)} steps of the "
            "schedule: the learning rate does not reach optimizer.lr"
        )
    decay = max(1, end // 5) if spec.decay_steps is None else spec.decay_steps
    if spec.schedule == "wsd" and decay > end - warmup:
        return (
            f"optimizer.decay_steps = {decay} and warmup_steps = {warmup} are more than the {end} "
            "steps of the schedule: after the warm-up the learning rate drops below optimizer.lr"
        )
    return None


def tokenizer_note(config: Config) -> str | None:
    """Return a note if `data.tokenizer` is not the tokenizer of `model.init_from`, else None."""
    init_from, given = config.model.init_from, config.data.tokenizer
    stored = None if init_from is None else stored_tokenizer(hub.folder_of(init_from))
    if stored is None or given in (stored[0], init_from):
        return None
    file = hub.folder_of(given)
    if file.is_dir():
        file = file / Path(stored[0]).name
    if file.is_file() and Path(stored[0]).is_file() and cmp(file, stored[0], shallow=False):
        return None
    return (
        f"data.tokenizer = {given!r}, but model.init_from was trained with {stored[0]}: its ids "
        "mean other texts"
    )


def run_notes(job: Job, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield notes on a run that starts, or resumes, on this machine."""
    config, layout, machine = job.config, job.layout, job.machine
    unused = unused_note(config.cluster.device, machine.device, find_gpus(environ))
    if unused is not None:
        yield unused
    if job.resume:
        yield from resume_notes(job)
    else:
        yield from config_notes(config)
    if (padding := vocabulary_padding(config.model, layout.tp)) is not None:
        yield f"vocabulary: {padding}"
    try:
        check_room(config, job.checkpoints, for_all=True)
    except ConfigError as error:
        yield str(error)
    chosen = config.origins["train.compile"].removeprefix("auto: ")
    if chosen != config.origins["train.compile"]:
        blocks = "compiled" if config.train.is_compiled else "not compiled"
        yield f"blocks are {blocks}: {chosen}"
    if machine.device == "cuda" and takes_tf32(config.train.matmul):
        yield "fp32 matmuls use TF32; train.matmul=torch computes them in full fp32"
    yield from layout_notes(config, layout, machine)


def layout_notes(config: Config, layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield notes on devices that a layout leaves unused, and on ranks that share CPU cores."""
    unused = left_over(config, layout, machine.devices * config.cluster.nodes)
    for text in (None if unused is None else unused.text, unsharded(layout)):
        if text is not None:
            yield text
    local_ranks = layout.world // config.cluster.nodes
    if machine.device == "cpu" and local_ranks > machine.cores:
        yield (
            f"the layout {layout.label} has {local_ranks} ranks on this machine, which share "
            f"{machine.cores} cores"
        )


def resume_notes(job: Job) -> Iterator[str]:
    """Yield notes on training settings of a resumed run that differ from its previous ones."""
    try:
        before = load_config(job.folder.config)
        done = int(steps(job.checkpoints)[-1].name.rpartition("-")[2])
    except (ConfigError, CheckpointError, IndexError, ValueError):
        return  # a run that is refused elsewhere
    notes = (
        _schedule_note(before, job.config, done),
        schedule_note(job.config),
        _change_note(before, job.config, done),
    )
    for text in notes:
        if text is not None:
            yield text


def _change_note(before: Config, current: Config, done: int) -> str | None:
    """Return a note on changed training settings other than the learning rate's, or None.

    `done` is the last finished step.
    """
    changed = []
    for section, keys in _OF_STEPS.items():
        for key in keys:
            old, new = (getattr(config, section).model_dump()[key] for config in (before, current))
            if old != new:
                changed.append(f"{section}.{key} was {old}, is {new}")
    return f"from step {done + 1} on: {'; '.join(changed)}" if changed else None


def _schedule_note(before: Config, current: Config, done: int) -> str | None:
    """Return a note if the learning rate jumps at the resumed step because its schedule changed."""
    step = done + 1
    rates = [
        learning_rate(step, config.train.steps, config.optimizer) for config in (before, current)
    ]
    if abs(rates[1] - rates[0]) <= 1e-6 * rates[0]:
        return None
    last = learning_rate(done, before.train.steps, before.optimizer)
    pairs = [("train.steps", before.train.steps, current.train.steps)]
    pairs += [
        (f"optimizer.{key}", getattr(before.optimizer, key), getattr(current.optimizer, key))
        for key in _OF_SCHEDULE
    ]
    changed = ", ".join(f"{key} was {old}, is {new}" for key, old, new in pairs if old != new)
    text = f"{changed}: the learning rate was {last:.2e} at step {done}, and is {rates[1]:.2e} next"
    if pairs[0][1] == pairs[0][2]:
        return text
    keeps = before.optimizer.schedule_steps or before.train.steps
    return f"{text}. optimizer.schedule_steps={keeps} keeps the schedule"
