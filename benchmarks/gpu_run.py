"""Measures the rows of `benchmarks.gpu` one after the other, for as long as there is time."""

from __future__ import annotations

import datetime
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import meshwright
from benchmarks.gpu_bench import Answer, Results, Worker, run_module, versions
from benchmarks.gpu_check import driver_advice
from benchmarks.gpu_page import machine_line, page, proof_line
from benchmarks.gpu_predicted import Trained, layers_within
from benchmarks.gpu_rows import MARGIN_S, Row, next_row
from meshwright.cost.calibration import as_toml, blocks_of
from meshwright.cost.catalogue import device_named, find_device
from meshwright.files import write_atomic
from meshwright.layout import Layout, Machine, resolve_layout
from meshwright.prove.case import Case
from meshwright.prove.shrink import shrink
from meshwright.runtime.machines.machine import detect
from meshwright.runtime.pricing.measured import source_of
from meshwright.runtime.ranks.local import rank_environ
from meshwright.spec.loading import Config, load_config

# Shares of the free memory that a prediction may fill: the second where the first was too much.
SHARES: Final = (0.95, 0.85)
STEPS: Final = 3
SOURCE: Final = Path(meshwright.__file__).parent
TESTS: Final = ("tests/parallel/test_context.py", "-k", "gpu")
ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PLAIN: Final = dict.fromkeys(ALLOCATOR, "expandable_segments:False")


@dataclass
class Run:
    """What is asked for, and what comes of it; at `until`, by `clock`, all of it ends."""

    device: str
    tiny: bool
    until: float
    preset: str = "h200"
    lacks: str | None = None
    out: Path | None = None
    clock: Callable[[], float] = time.monotonic
    machine: dict[str, Any] = field(default_factory=dict)
    results: Results = field(default_factory=lambda: Results(""))

    def __post_init__(self) -> None:
        self.worker, self.started = self._worker({}), self.clock()

    def _worker(self, more: Mapping[str, str]) -> Worker:
        """Return the process that measures, with the environment of a rank that has all cores."""
        is_cuda = self.device == "cuda"
        threads = (os.cpu_count() or 1) if is_cuda else 1
        environ = rank_environ(os.environ, threads, on_gpus=is_cuda)
        command = [sys.executable, "-m", "benchmarks.gpu_worker", self.device]
        return Worker(command, environ | dict(more))

    @property
    def left(self) -> float:
        """Seconds that there are for measuring."""
        return self.until - MARGIN_S - self.clock()

    @property
    def words(self) -> list[str]:
        """The overrides that choose the device, and on a GPU what predictions are for."""
        found = [f"cluster.device={self.device}", "cluster.devices_per_node=1"]
        return found if self.device == "cpu" else [*found, f"cluster.preset={self.preset}"]

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{self.clock() - self.started:5.0f} s: {text}", flush=True)

    def look(self) -> str | None:
        """Find out what device there is, and open its results; returns why that failed."""
        answer = self.worker.ask({"do": "look"}, self.left)
        if answer.failed and self.device == "cuda" and "unreachable" not in answer.found:
            # Its allocator may not be able to map memory as it needs it.
            self.say("once more, with memory that does not grow in place")
            self.worker.end()
            self.worker = self._worker(PLAIN)
            answer = self.worker.ask({"do": "look"}, self.left)
        if "unreachable" in answer.found:
            return driver_advice(answer.found["unreachable"], answer.found["cuda"])
        if answer.failed:
            return "\n".join([*answer.told, f"the device cannot be looked at: {answer.failed}"])
        self.machine = answer.found
        known = device_named(self.machine["name"]) if self.device == "cuda" else None
        self.preset = self.preset if known is None else known.name
        self.results = Results(versions(self.machine, SOURCE), self.out and self.out / "gpu.jsonl")
        self.say(machine_line(self.machine, self.preset))
        return None

    def measure(self, rows: list[Row]) -> None:
        """Measure what is missing while there is time; what has failed before comes last."""
        missing = [row for row in rows if row.key not in self.results.found]
        left = sorted(missing, key=lambda row: row.key in self.results.failed)
        if len(missing) < len(rows):
            self.say(f"{len(rows) - len(missing)} of {len(rows)} rows were measured before")
        while (row := next_row(left, self.left)) is not None:
            left.remove(row)
            began = self.clock()
            answer = self.attempt(row)
            self.results.add(row.key, answer, self.clock() - began)
            self.say(self.line(row, answer))
            self.write()

    def attempt(self, row: Row) -> Answer:
        """Measure a row; whatever raises is told in the answer."""
        limit = min(self.left, 3 * row.seconds + 60)
        try:
            return DOES[row.work](self, row, limit)
        except Exception as error:
            return Answer({}, f"{type(error).__name__}: {error}")

    def line(self, row: Row, answer: Answer) -> str:
        """Return a row's result in a line."""
        failed = f"failed, {answer.failed}" if answer.failed else ""
        if not answer.found:
            return f"{row.key}: {failed}"
        said = ""
        if row.work == "train":
            trained = Trained.of_found(answer.found, self.calibrations())
            said = trained.line(find_device(self.preset).peaks["bf16"])
        if row.work == "prove":
            said = proof_line(answer.found)
        return f"{row.key}: {'; '.join(filter(None, (said, failed))) or 'done'}"

    def calibrations(self) -> list[str]:
        """Return what was measured of the device, each as TOML."""
        return [one["toml"] for one in self.results.found.values() if "toml" in one]

    def write(self) -> None:
        """Write the page of what is there by now."""
        if self.out is not None:
            write_atomic(self.out / "gpu.md", self.page().encode())

    def page(self) -> str:
        """Return the page of what is there by now."""
        notes = [] if self.lacks is None else [self.lacks]
        return page(self.machine, self.preset, self.results, notes)


def train(run: Run, row: Row, limit_s: float) -> Answer:
    """Run steps of a shape, with as many of its layers as are predicted to fit."""
    until = run.clock() + limit_s
    free = run.machine.get("free_bytes")
    more = [*row.words, f"train.precision={'fp32' if run.tiny else 'bf16'}", *run.words]
    layout, answer = Layout.parse(row.label), Answer()
    for share in SHARES:
        layers = row.shape.layers
        if free is not None:
            layers = layers_within(free * share, row.shape, more, layout)
        words = [*row.shape.words(layers), *more]
        config = load_config(None, words)
        asked = {"do": "train", "case": Case(config.model, config.train, layout).as_json()}
        asked |= {"steps": STEPS, "profiles": row.profiles}
        answer = run.worker.ask(asked, until - run.clock())
        if "step_times_s" in answer.found:
            seconds = answer.found["step_times_s"]
            answer.found |= {"config": words, "layout": row.label, "of": row.shape.layers}
            answer.found |= {"step_time_s": statistics.median(seconds), "shape": row.shape.name}
        if answer.failed != "out of memory":
            break
    return answer


def calibrate(run: Run, row: Row, limit_s: float) -> Answer:
    """Measure the device with the blocks of a shape."""
    words = [*row.shape.words(row.shape.layers), *row.words, *run.words]
    words += [] if run.tiny else ["train.precision=bf16"]
    config, machine, layout = resolved(words)
    compiles = run.lacks is None and not run.tiny
    asked = {"do": "calibrate", "case": Case(config.model, config.train, layout).as_json()}
    asked |= {"budget_s": 0.02 if run.tiny else 0.7, "compiles": compiles}
    answer = run.worker.ask(asked, limit_s)
    if answer.failed or not answer.found:
        return answer
    kind = "cpu" if run.device == "cpu" else find_device(run.preset).kind
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = source_of(machine, answer.found, "make gpu")
    blocks = blocks_of(config.model, config.train.seq_len)
    constants = {kind: answer.found["constants"]}
    answer.found["toml"] = as_toml(constants, date, source, blocks, answer.found["had_core"])
    if run.out is not None:
        write_atomic(run.out / f"gpu-{row.shape.name}.toml", answer.found["toml"].encode())
    return answer


def prove(run: Run, row: Row, limit_s: float) -> Answer:
    """Hold a layout of one rank on the device against one CPU."""
    config, _, layout = resolved([*row.words, *run.words])
    packed = config.data.packing == "documents"
    (case,) = shrink(config.model, config.train, layout, packed=packed)
    return run.worker.ask({"do": "prove", "case": case.as_json()}, limit_s)


def resolved(words: list[str]) -> tuple[Config, Machine, Layout]:
    """Return the config of some overrides, with this machine and its layout."""
    config = load_config(None, words)
    machine = detect(config.cluster, os.environ)
    return config, machine, resolve_layout(config, machine)


def syncs(run: Run, row: Row, limit_s: float) -> Answer:
    """Have CUDA say whether a step makes the host wait."""
    words = ("--device", run.device)
    return run_module("benchmarks.syncs", *words, environ=run.worker.environ, limit_s=limit_s)


def tests(run: Run, row: Row, limit_s: float) -> Answer:
    """Run the tests that need a GPU, where there is something to run them with."""
    if importlib.util.find_spec("pytest") is None:
        return Answer({}, "pytest is not installed")
    words = ("-q", "-p", "no:cacheprovider", *TESTS)
    return run_module("pytest", *words, environ=run.worker.environ, limit_s=limit_s)


DOES: Final[Mapping[str, Callable[[Run, Row, float], Answer]]] = {
    "train": train,
    "calibrate": calibrate,
    "prove": prove,
    "syncs": syncs,
    "tests": tests,
}


def has_failed(found: Mapping[str, Mapping[str, Any]], rows: list[Row]) -> bool:
    """Whether anything that was asked for is wrong, or nothing of a part is there."""
    there = [(row, found[row.key]) for row in rows if row.key in found]
    if any(row.part not in {one.part for one, _ in there} for row in rows):
        return True
    return any(one.get("failed") or one.get("code") for _, one in there)
