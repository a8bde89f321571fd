"""Reads the step time and peak memory from the logs of other trainers, as one measurement.

Known are the lines of torchtitan (components/metrics.py), Megatron-LM (training/training.py),
DeepSpeed (utils/timer.py), transformers' Trainer and axolotl (the dictionaries that they print, and
trainer_state.json), and the CSV that Weights & Biases exports.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.errors import ConfigError
from meshwright.interop.flat import read_text
from meshwright.units import GIB, counted, format_bytes, format_seconds

# The first steps compile, tune and fill caches: this share of them is left out.
_WARM_UP: Final = 0.1
# A step is an outlier if it is so many times the median distance from the median away.
_FAR: Final = 5.0
# Steps whose times differ by less than this share of the median are alike in any case.
_ALIKE: Final = 0.02
_MIB: Final = 2**20
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


class LoggedRun(NamedTuple):
    """The sizes by which rates in a log become step times: sequences of a step, length, ranks.

    `model_ranks` is the number of ranks that work on one sequence together.
    """

    batch: int
    seq_len: int
    ranks: int
    model_ranks: int

    @property
    def tokens(self) -> int:
        """The number of tokens in a step."""
        return self.batch * self.seq_len


class LoggedStep(NamedTuple):
    """A line's step time in seconds and peak memory in bytes; None where it has none.

    `line` counts from 1; `is_allocated` says that the bytes are those of tensors only.
    """

    line: int
    step: int
    seconds: float | None = None
    bytes: float | None = None
    is_allocated: bool = False


class LoggedTimes(NamedTuple):
    """The measurement in a log: the median step time, the largest peak, and notes on both."""

    seconds: float | None
    bytes: float | None
    is_allocated: bool
    says: list[str]


_Reader = Callable[[Sequence[str], LoggedRun], Iterator[LoggedStep]]
_NUMBER: Final = r"([\d.,]+(?:e[+-]?\d+)?)"
_TITAN: Final = re.compile(
    rf"\bstep:\s*(\d+)\b.*?memory:\s*{_NUMBER}GiB.*?\btps:\s*{_NUMBER}", re.IGNORECASE
)
_MEGATRON: Final = re.compile(
    rf"\biteration\s+(\d+)/.*?elapsed time per iteration \(ms\):\s*{_NUMBER}"
)
_MEGATRON_MEMORY: Final = re.compile(
    rf"after (\d+) iterations\).*?memory \(MB\).*?max reserved:\s*{_NUMBER}"
)
_DEEPSPEED: Final = re.compile(
    rf"global_step=(\d+),.*?CurrSamplesPerSec={_NUMBER}(?:.*?MaxMemAllocated={_NUMBER}GB)?"
)


def _number(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))


def _torchtitan(lines: Sequence[str], run: LoggedRun) -> Iterator[LoggedStep]:
    """Yield the steps in a log of torchtitan.

    `tps` is the tokens of a step per second and device.
    """
    for number, line in enumerate(lines, 1):
        match = None if "validate" in line else _TITAN.search(line)
        if match and (rate := _number(match[3])) > 0:
            seconds = run.tokens / run.ranks / rate
            yield LoggedStep(number, int(match[1]), seconds, _number(match[2]) * GIB)


def _megatron(lines: Sequence[str], run: LoggedRun) -> Iterator[LoggedStep]:
    for number, line in enumerate(lines, 1):
        if match := _MEGATRON.search(line):
            yield LoggedStep(number, int(match[1]), _number(match[2]) / 1e3)
        elif match := _MEGATRON_MEMORY.search(line):
            yield LoggedStep(number, int(match[1]), None, _number(match[2]) * _MIB)


def _deepspeed(lines: Sequence[str], run: LoggedRun) -> Iterator[LoggedStep]:
    """Yield the steps in a log of DeepSpeed.

    `CurrSamplesPerSec` is the sequences of all ranks per second.
    """
    for number, line in enumerate(lines, 1):
        match = _DEEPSPEED.search(line)
        if match and (rate := _number(match[2])) > 0:
            size = _number(match[3]) * GIB if match[3] else None
            yield LoggedStep(number, int(match[1]), run.batch / rate, size, is_allocated=True)


# What metrics are called: a time of a step, tokens per second of a device and of all, peaks.
_SECONDS: Final = ("time_metrics/end_to_end(s)", "iteration-time", "step_time", "train/step_time")
_PER_DEVICE: Final = (
    *("throughput(tps)", "tokens/train_per_sec_per_gpu", "train/tokens_per_sec_per_gpu"),
    *("train/tokens_per_second_per_gpu", "tokens_per_second_per_gpu"),
)
_PER_SECOND: Final = ("train_tokens_per_second", "train/tokens_per_second", "tokens_per_second")
_RESERVED: Final = (
    *("memory/max_reserved(GiB)", "memory/device_reserved (GiB)", "memory/max_reserved (GiB)"),
)
_ALLOCATED: Final = (
    *("memory/max_active(GiB)", "memory/max_active (GiB)", "memory/max_allocated (GiB)"),
    "memory/max_allocated(GiB)",
)


def _of_metrics(number: int, metrics: Mapping[str, Any], run: LoggedRun) -> LoggedStep | None:
    """Return the step that a dictionary of metrics describes; None if it has no known metric."""

    def first(names: Iterable[str]) -> float | None:
        for name in names:
            try:
                value = float(metrics[name])
            except (KeyError, TypeError, ValueError):
                continue
            if value > 0:
                return value
        return None

    seconds, reserved, allocated = first(_SECONDS), first(_RESERVED), first(_ALLOCATED)
    if seconds is None and (rate := first(_PER_DEVICE)) is not None:
        seconds = run.tokens / run.ranks / rate
    if seconds is None and (rate := first(_PER_SECOND)) is not None:
        seconds = run.tokens / rate
    size = reserved if reserved is not None else allocated
    if seconds is None and size is None:
        return None
    step = metrics.get("step", metrics.get("Step", metrics.get("_step", number)))
    byte_count = None if size is None else size * GIB
    return LoggedStep(number, int(float(step)), seconds, byte_count, is_allocated=reserved is None)


def _dictionaries(lines: Sequence[str], run: LoggedRun) -> Iterator[LoggedStep]:
    """Yield the steps in the dictionaries that transformers' Trainer and axolotl print."""
    for number, line in enumerate(lines, 1):
        match = re.search(r"\{'.*\}", line)
        if match is None:
            continue
        try:
            metrics = ast.literal_eval(match[0])
        except (ValueError, SyntaxError):
            continue
        step = _of_metrics(number, metrics, run) if isinstance(metrics, dict) else None
        if step is not None and "train_runtime" not in metrics:
            yield step


def _table(lines: Sequence[str], run: LoggedRun) -> Iterator[LoggedStep]:
    """Yield the steps in a CSV of Weights & Biases, whose columns are "RUN - METRIC"."""
    rows = csv.reader(lines)
    header = next(rows, [])
    names = [name.rsplit(" - ", 1)[-1] for name in header]
    for number, row in enumerate(rows, 2):
        metrics = {
            name: value
            for name, value in zip(names, row, strict=False)
            if value != "" and not name.endswith(("__MIN", "__MAX"))
        }
        step = _of_metrics(number, metrics, run)
        if step is not None:
            yield step


_LINES: Final[Mapping[str, _Reader]] = {
    "torchtitan": _torchtitan,
    "Megatron-LM": _megatron,
    "DeepSpeed": _deepspeed,
    "transformers' Trainer or axolotl": _dictionaries,
}
_SAMPLE: Final = LoggedRun(1, 1, 1, 1)


def is_log(path: Path) -> bool:
    """Return whether `read_log` recognizes the content of a file."""
    if path.suffix == ".jsonl":
        return False
    text = read_text(path)
    if path.suffix == ".json":
        return '"log_history"' in text
    return _recognised(path, _split(text)) is not None


def _split(text: str) -> list[str]:
    return _COLOUR.sub("", text).splitlines()


def _recognised(path: Path, lines: Sequence[str]) -> tuple[str, _Reader] | None:
    if path.suffix == ".csv":
        return ("Weights & Biases", _table) if lines and "," in lines[0] else None
    for name, reader in _LINES.items():
        if next(reader(lines, _SAMPLE), None) is not None:
            return name, reader
    return None


def read_log(path: Path, run: LoggedRun) -> LoggedTimes:
    """Return the step time and the peak memory in a log, without warm-up and outliers.

    Raises `ConfigError` if it has neither.
    """
    text = read_text(path)
    if path.suffix == ".json":
        return _of_state(path, text, run)
    lines = _split(text)
    known = _recognised(path, lines)
    steps = list(known[1](lines, run)) if known is not None else []
    if known is None or not steps:
        raise ConfigError(f"{path} has no line of a step that is known: {', '.join(_LINES)}")
    return _measured(path, known[0], steps)


def _of_state(path: Path, text: str, run: LoggedRun) -> LoggedTimes:
    """Return the measurement in a trainer_state.json, from its steps or else the whole run."""
    try:
        history = json.loads(text)["log_history"]
        entries = [entry for entry in history if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a trainer_state.json: {error}") from None
    steps = [
        logged
        for number, entry in enumerate(entries, 1)
        if "train_runtime" not in entry and (logged := _of_metrics(number, entry, run)) is not None
    ]
    if any(step.seconds is not None for step in steps):
        return _measured(path, "trainer_state.json", steps, unit="entry")
    last = next((entry for entry in entries if "train_runtime" in entry), None)
    if last is None or not last.get("train_steps_per_second"):
        raise ConfigError(
            f"{path}: no entry of log_history has a time; nearest: include_num_input_tokens_seen, "
            "or the train_runtime of a run that has ended"
        )
    seconds = 1 / float(last["train_steps_per_second"])
    note = f"{path}: {format_seconds(seconds)} is the mean of the whole run, warm-up included"
    return LoggedTimes(seconds, None, is_allocated=False, says=[note])


def _measured(
    path: Path, kind: str, steps: Sequence[LoggedStep], unit: str = "line"
) -> LoggedTimes:
    """Return the median of the steps that are neither warm-up nor outliers, with notes.

    `unit` is what a step's number counts, for the notes.
    """
    timed = [step for step in steps if step.seconds is not None]
    warm = max(1, round(_WARM_UP * len(timed))) if len(timed) > 1 else 0
    settled = timed[warm:]
    typical = _alike(settled)
    says = []
    if typical:
        seconds = statistics.median(step.seconds or 0.0 for step in typical)
        span = f"{unit}s {typical[0].line} to {typical[-1].line}"
        says.append(
            f"{path} ({kind}): {format_seconds(seconds)} a step, the median of "
            f"{counted(len(typical), 'step')} ({span}); left out: {warm} of warm-up and "
            f"{counted(len(settled) - len(typical), 'outlier')}"
        )
    sizes = [step for step in steps if step.bytes is not None]
    largest = max(sizes, key=lambda step: step.bytes or 0.0, default=None)
    if largest is not None and largest.bytes is not None:
        measure = "of tensors" if largest.is_allocated else "reserved"
        says.append(f"{path}: peak {format_bytes(largest.bytes)} {measure} ({unit} {largest.line})")
    return LoggedTimes(
        statistics.median(step.seconds or 0.0 for step in typical) if typical else None,
        None if largest is None else largest.bytes,
        is_allocated=largest is not None and largest.is_allocated,
        says=says,
    )


def _alike(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    """Return the steps that are not outliers, by the median absolute deviation of their times."""
    if not steps:
        return []
    times = [step.seconds or 0.0 for step in steps]
    middle = statistics.median(times)
    spread = statistics.median(abs(time - middle) for time in times)
    limit = max(_FAR * spread, _ALIKE * middle)
    return [step for step in steps if abs((step.seconds or 0.0) - middle) <= limit]
