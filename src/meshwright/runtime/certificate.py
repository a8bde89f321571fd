"""The resume certificate: compares an interrupted and resumed run with an uninterrupted one.

The runs are those of `train`, with the config's own data, precision, optimizer and schedule; the
layout and the model are made small, as for every proof. No torch here.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from meshwright.checkpoint.commit import digest_of, read_manifest, step_name, steps
from meshwright.errors import EXIT_STOPPED, CheckpointError, StoppedOnRequest
from meshwright.layout import Layout
from meshwright.parsing import foreign, parse_json
from meshwright.prove.case import Case
from meshwright.prove.verdict import Divergence, Quantity, Verdict
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.run import Run
from meshwright.runtime.session import train
from meshwright.spec.loading import Config
from meshwright.spec.optimizers import SQUARES, State, numbers_of
from meshwright.spec.training import LogSpec
from meshwright.training.sinks import trackers_of

Arrays = Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]
# A tensor has at most so many times the elements of its chunks: an offset may say anything.
_SPARSE: Final = 64


def read_whole(folder: Path, kind: str) -> Arrays:
    """Return the whole tensors, as fp64, of a saved step's files "weights-*" or "optimizer-*".

    `folder` is the step's and `kind` the prefix of the files. Each file's header has the position
    of every chunk in its tensor (`DCP_SHARDING_INFO`, see `checkpoint.tensors`). Elements that no
    chunk covers are NaN. Raises `CheckpointError` for damaged files.
    """
    chunks: dict[str, list[tuple[list[int], Any]]] = {}
    for path in sorted(folder.glob(f"{kind}-*.safetensors")):
        with foreign(str(path), CheckpointError), _opened(path) as opened:
            positions = parse_json(opened.metadata()["DCP_SHARDING_INFO"])
            wide = _in_bf16(path, opened)
            for name in opened.keys():  # noqa: SIM118 - not a dict
                chunk = wide[name] if name in wide else opened.get_tensor(name)
                chunks.setdefault(name, []).append((positions[name]["saved_offsets"], chunk))
    with foreign(f"{folder}/{kind}-*.safetensors", CheckpointError):
        return {name: _joined(tensor_chunks) for name, tensor_chunks in chunks.items()}


def _in_bf16(path: Path, opened: Any) -> dict[str, Any]:
    """Return the bf16 tensors of a file converted to fp32, by name, since numpy lacks bf16."""
    if all(opened.get_slice(name).get_dtype() != "BF16" for name in opened.keys()):  # noqa: SIM118
        return {}
    entries: Any = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    return {
        name: (np.frombuffer(entry["data"], "<u2").astype("<u4") << 16)
        .view("<f4")
        .reshape(entry["shape"])
        for name, entry in entries
        if entry["dtype"] == "BF16"
    }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error


def _joined(chunks: list[tuple[list[int], Any]]) -> Any:
    ends = [
        [offset + length for offset, length in zip(start, chunk.shape, strict=True)]
        for start, chunk in chunks
    ]
    shape = [max(along) for along in zip(*ends, strict=True)]
    if math.prod(shape) > _SPARSE * sum(chunk.size for _, chunk in chunks):
        raise ValueError(f"chunks that leave most of {shape} open")
    joined = np.full(shape, np.nan)
    with np.errstate(invalid="ignore"):  # damaged numbers are compared, not told of one by one
        for (start, chunk), end in zip(chunks, ends, strict=True):
            joined[tuple(slice(a, b) for a, b in zip(start, end, strict=True))] = chunk
    return joined


def widened(arrays: Arrays) -> Arrays:
    """Return tensors, of which those in 8 bits are what their codes and scales stand for."""
    wide = {name: array for name, array in arrays.items() if "_scale." not in name}
    for name in wide:
        key, _, parameter = name.partition(".")
        scales = arrays.get(f"{State(key).scale_key}.{parameter}")
        if scales is not None:
            numbers = np.array(numbers_of(key))[wide[name].astype(np.int64)]
            root = numbers * scales.repeat(numbers.shape[-1] // scales.shape[-1], -1)
            wide[name] = root**2 if key in SQUARES else root
    return wide


def distance(observed: Arrays, expected: Arrays) -> tuple[float, str]:
    """Return the largest relative error of any tensor, and that tensor's name.

    The error is the L2 norm of the difference, relative to the norm of the expected tensor, or to
    1e-5 of the largest norm if that is greater, because a vanishing tensor has only rounding noise.
    It is infinite if a tensor is missing, has another shape or contains NaN.
    """
    norms = {name: float(np.linalg.norm(tensor)) for name, tensor in expected.items()}
    floor = 1e-5 * max(norms.values(), default=0.0)
    worst = (0.0, "")
    for name in dict.fromkeys((*expected, *observed)):
        off = float("inf")
        if name in expected and name in observed and observed[name].shape == expected[name].shape:
            off = float(np.linalg.norm(observed[name] - expected[name]))
            off = off / max(norms[name], floor, 1e-300) if off == off else float("inf")
        if off >= worst[0]:
            worst = (off, name)
    return worst


def minus(after: Arrays, before: Arrays) -> Arrays:
    """Return the change of each tensor; NaN if it did not exist before or had another shape."""
    return {name: tensor - _like(tensor, before.get(name)) for name, tensor in after.items()}


def _like(tensor: Any, candidate: Any) -> Any:
    is_like = candidate is not None and candidate.shape == tensor.shape
    return candidate if is_like else np.full(tensor.shape, np.nan)


def above_noise(change: Arrays, state: Arrays, noise: float) -> Arrays:
    """Return weight updates with 0 where the gradient is only rounding noise.

    AdamW turns even such gradients into full steps. `state` is the optimizer's. An element counts
    as noise if the root of its second moment is below `noise` times the root mean square of all.
    """
    second = {name: state[f"exp_avg_sq.{name}"] for name in change if f"exp_avg_sq.{name}" in state}
    if not second:
        return change
    count = sum(moment.size for moment in second.values())
    threshold = noise**2 * sum(float(moment.sum()) for moment in second.values()) / count
    return {
        name: update * (_like(update, second.get(name)) > threshold) if name in second else update
        for name, update in change.items()
    }


STEPS: Final = 10
# What a step's files must agree in besides their hashes.
_FACTS: Final = ("step", "samples", "tokens", "identity", "loss_scale", "scalars")
# Another layout resumes from this step, and takes so many more, which are compared.
_FROM: Final = 5
_ON: Final = 3
_TINY: Final = 1e-30  # for a loss of 0


class Bounds(NamedTuple):
    """The relative tolerances for resuming on another layout: losses, optimizer state and updates.

    Moments are sums of gradients, so their error is some hundred rounding errors. Updates are
    compared only where gradients exceed `noise` times their root mean square.
    """

    loss: float
    state: float
    update: float
    noise: float


BOUNDS: Final[Mapping[str, Bounds]] = {
    "fp32": Bounds(2e-6, 2.0**-12, 2.0**-7, 1e-3),
    "bf16": Bounds(2e-2, 2.0**-3, 2.0**-2, 0.2),
    "fp16": Bounds(3e-3, 2.0**-6, 2.0**-4, 0.05),
}


# Of moments in int8, in other blocks than those that were saved.
_OTHER_BLOCKS: Final = Bounds(2e-3, 2.0**-4, 2.0**-3, 1e-2)


def bounds_of(config: Config) -> Bounds:
    """Return the tolerances for a config."""
    bounds = BOUNDS[config.train.precision]
    if config.optimizer.state_dtype != "int8":
        return bounds
    return Bounds(*map(max, zip(bounds, _OTHER_BLOCKS, strict=True)))


def certify(
    config: Config,
    case: Case,
    folder: Path,
    environ: Mapping[str, str],
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[Verdict]:
    """Yield verdicts on whether resumed runs of a config equal an uninterrupted one.

    `case` is the small model and layout used in place of the config's. `folder` receives the runs.
    `show` is called with progress messages.
    """
    runs = _Runs(small_config(config, case, folder), folder, environ, show)
    layout = case.layout.model_dump(mode="json")
    uninterrupted = runs.begin("whole")

    def same(claim: str, run: Run, *steps: int) -> Verdict:
        expected = [_digest(uninterrupted.folder, step) for step in steps]
        observed = [_digest(run.folder, step) for step in steps]
        wrong = first_difference(uninterrupted.folder, run.folder, steps)
        return Verdict(claim, layout, expected, wrong or observed, None, wrong is None)

    yield same("5 + 5 steps are 10, bit for bit", runs.go_on(uninterrupted, 5, "half"), STEPS)
    once = runs.go_on(uninterrupted, 3, "once")
    twice = runs.go_on(once, 6, "twice")
    yield same("3 + 3 + 4 steps are 10, bit for bit", twice, 6, STEPS)
    alone = runs.go_on(uninterrupted, _FROM, "alone", Layout(microbatch=case.layout.microbatch))
    yield from on_another(uninterrupted, alone, layout, bounds_of(config))


def on_another(
    uninterrupted: Run, other: Run, layout: Mapping[str, Any], bounds: Bounds
) -> Iterator[Verdict]:
    """Yield verdicts on three steps that one rank took from the state that another layout saved.

    A misplaced restored state does not change the loss of the next step, but does change the update
    that this step adds to the weights.
    """
    last = _FROM + _ON
    steps = f"steps {_FROM + 1} to {last}"
    claims = {"step": f"{steps} have the same losses", "eval": f"step {last} is evaluated the same"}
    for kind, same in claims.items():
        expected, observed = (
            _losses(run, kind, range(_FROM + 1, last + 1)) for run in (uninterrupted, other)
        )
        if kind == "eval" and not expected:  # the config evaluates nothing
            continue
        error = _off(expected, observed)
        claim = f"on one rank {same}"
        yield Verdict(claim, layout, expected, observed, bounds.loss, error <= bounds.loss)

    def tensors(run: Run, kind: str, step: int) -> Arrays:
        return widened(read_whole(run.folder / "checkpoints" / step_name(step), kind))

    start = tensors(uninterrupted, "weights", _FROM)
    state = [tensors(run, "optimizer", last) for run in (other, uninterrupted)]
    changes = [minus(tensors(run, "weights", last), start) for run in (other, uninterrupted)]
    added = [above_noise(change, state[1], bounds.noise) for change in changes]
    compared: list[tuple[str, list[Arrays], float, Quantity]] = [
        (f"on one rank {steps} add the same to weights", added, bounds.update, "update"),
        (f"on one rank step {last} has the same state", state, bounds.state, "optimizer state"),
    ]
    for claim, (resumed, wanted), bound, quantity in compared:
        if not wanted:  # SGD without momentum keeps nothing
            continue
        error, tensor = distance(resumed, wanted)
        where = None
        if error > bound:
            where = Divergence(tensor, 0, 0, None, error, quantity, step=last)
        yield Verdict(claim, layout, 0.0, error, bound, error <= bound, where)


def small_config(config: Config, case: Case, folder: Path) -> Config:
    """Return the config with the model and layout of a small case; vocabulary and data stay."""
    model = case.model.model_copy(
        update={"vocab_size": config.model.vocab_size, "dropout": config.model.dropout}
    )
    section = config.layout.model_copy(update={"auto": False, **case.layout.model_dump()})
    train_update = {
        "batch": case.train.batch,
        "seq_len": case.train.seq_len,
        "steps": STEPS,
        # Once, where the config evaluates at all.
        "eval_every": _FROM + _ON if config.train.eval_every else 0,
    }
    saving = {"every": 1, "keep": STEPS, "dir": None}
    world = {"device": "cpu", "devices_per_node": case.layout.world, "nodes": 1, "memory": None}
    untracked = {name: LogSpec.model_fields[name].default for name in trackers_of(config.log)}
    log = {"dir": str(folder), "name": None, **untracked}
    return config.model_copy(
        update={
            "model": model,
            "layout": section,
            "train": config.train.model_copy(update=train_update),
            "checkpoint": config.checkpoint.model_copy(update=saving),
            "cluster": config.cluster.model_copy(update={**world, "port": None}),
            "log": config.log.model_copy(update=log),
        }
    )


class _Runs:
    """Starts runs, and resumes copies of them that are cut off after a step."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        environ: Mapping[str, str],
        show: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._environ, self._show = config, folder, environ, show

    def begin(self, name: str) -> Run:
        """Train all steps, saving each of them, and return the run."""
        self._show(f"run of {STEPS} steps")
        log = self._config.log.model_copy(update={"name": name})
        config = self._config.model_copy(update={"log": log})
        return _whole(train(config, self._environ, io.StringIO()))

    def go_on(self, run: Run, after: int, name: str, layout: Layout | None = None) -> Run:
        """Copy a run as if it had ended after step `after`, resume the copy, and return it.

        `layout` is the layout to resume on; None keeps the run's own.
        """
        copy = self._folder / name
        shutil.copytree(run.folder, copy)
        for path in steps(copy / "checkpoints"):
            if path.name > step_name(after):
                shutil.rmtree(path)
        (copy / "events.jsonl").unlink()
        config = self._config
        where = "" if layout is None else " on one rank"
        if layout is not None:
            section = config.layout.model_copy(update=layout.model_dump())
            cluster = config.cluster.model_copy(update={"devices_per_node": layout.world})
            config = config.model_copy(update={"layout": section, "cluster": cluster})
        self._show(f"resume after step {after}{where}")
        return _whole(train(config, self._environ, io.StringIO(), resume=Resume(copy)))


def _whole(run: Run) -> Run:
    """Return the run unchanged; raises `StoppedOnRequest` if it was stopped early."""
    if run.exit_code == EXIT_STOPPED:
        raise StoppedOnRequest("stopped on request: the runs were not compared")
    return run


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    return read_manifest(folder / "checkpoints" / step_name(step))


def _digest(folder: Path, step: int) -> str:
    text = json.dumps(_manifest(folder, step), sort_keys=True)
    return f"step {step}: {digest_of([text])[:16]}"


def first_difference(uninterrupted: Path, resumed: Path, steps: tuple[int, ...]) -> str | None:
    """Return the first difference between the saved `steps` of two runs, or None."""
    for step in steps:
        expected, observed = _manifest(uninterrupted, step), _manifest(resumed, step)
        if not any(name.startswith("weights-") for name in expected["files"]):
            return f"step {step} holds no weights"
        for name, file in expected["files"].items():
            if observed["files"].get(name) != file:
                return f"{name} of step {step} differs"
        for fact in _FACTS:
            if observed.get(fact) != expected.get(fact):
                return f"{fact} of step {step} is {observed.get(fact)}, not {expected.get(fact)}"
    return None


def _losses(run: Run, kind: str, steps: range) -> list[float]:
    """Return the losses of the "step" or "eval" events of some steps; NaN if not a number."""
    return [_number(event["loss"]) for event in run.events(kind) if event["step"] in steps]


def _number(value: Any) -> float:
    with contextlib.suppress(ValueError):  # a loss that is not finite is a text
        return float(value)
    return math.nan


def _off(expected: list[float], observed: list[float]) -> float:
    """Return the largest relative error of losses; infinite if one is missing or not finite."""
    if len(expected) != len(observed) or not expected:
        return math.inf
    pairs = zip(expected, observed, strict=True)
    errors = [abs(a - b) / max(abs(a), _TINY) for a, b in pairs]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
