"""The resume certificate: a config's run, interrupted and continued, against the same run whole.

The runs are those of `train`, with the config's own data, precision, optimizer and schedule; the
layout and the model are made small, as for every proof. No torch here.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from meshwright.checkpoint.commit import MANIFEST, step_name, steps
from meshwright.launch.session import Resume, Run, train
from meshwright.layout import Layout
from meshwright.prove.case import Case
from meshwright.prove.verdict import Verdict
from meshwright.spec.loading import Config

STEPS: Final = 10
# What a step's files must agree in besides their hashes.
_FACTS: Final = ("step", "samples", "tokens", "identity", "loss_scale", "scalars")
# Of the loss of the first step that another layout computes: some roundings of the precision.
_TOLERANCES: Final[Mapping[str, float]] = {"fp32": 2e-6, "bf16": 2e-2, "fp16": 3e-3}


def certify(
    config: Config,
    case: Case,
    folder: Path,
    environ: Mapping[str, str],
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[Verdict]:
    """Yield the verdicts on resuming a config, for one of the small cases that stand for it.

    `folder` gets the runs. `show` is told what is run.
    """
    runs = _Runs(small_config(config, case, folder), folder, environ, show)
    layout = case.layout.model_dump(mode="json")
    whole = runs.begin("whole")

    def same(claim: str, run: Run, *at: int) -> Verdict:
        expected = [_digest(whole.folder, step) for step in at]
        observed = [_digest(run.folder, step) for step in at]
        wrong = _first_difference(whole.folder, run.folder, at)
        return Verdict(claim, layout, expected, wrong or observed, None, wrong is None)

    yield same("5 + 5 steps are 10, bit for bit", runs.go_on(whole, 5, "half"), STEPS)
    once = runs.go_on(whole, 3, "once")
    twice = runs.go_on(once, 6, "twice")
    yield same("3 + 3 + 4 steps are 10, bit for bit", twice, 6, STEPS)
    alone = runs.go_on(whole, 5, "alone", Layout(microbatch=case.layout.microbatch))
    expected, observed = _loss(whole, 6), _loss(alone, 6)
    error, bound = abs(observed - expected) / abs(expected), _TOLERANCES[config.train.precision]
    claim = "on one rank step 6 has the same loss"
    yield Verdict(claim, layout, 0.0, error, bound, error <= bound)


def small_config(config: Config, case: Case, folder: Path) -> Config:
    """Return the config with the case's layout and model, but its own vocabulary and data."""
    model = case.model.model_copy(
        update={"vocab_size": config.model.vocab_size, "dropout": config.model.dropout}
    )
    section = config.layout.model_copy(update={"auto": False, **case.layout.model_dump()})
    train_update = {
        "batch": case.train.batch,
        "seq_len": case.train.seq_len,
        "steps": STEPS,
        "eval_every": 0,
    }
    saving = {"every": 1, "keep": STEPS, "dir": None}
    world = {"device": "cpu", "devices_per_node": case.layout.world, "nodes": 1, "memory": None}
    log = {"dir": str(folder), "name": None, "tensorboard": False, "wandb": None, "trackio": None}
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
    """Starts runs, and goes on with copies of them cut off after a step."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        environ: Mapping[str, str],
        show: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._environ, self._show = config, folder, environ, show

    def begin(self, name: str) -> Run:
        """Return a run of all steps, each of them saved."""
        self._show(f"run of {STEPS} steps")
        log = self._config.log.model_copy(update={"name": name})
        config = self._config.model_copy(update={"log": log})
        return train(config, self._environ, io.StringIO())

    def go_on(self, run: Run, after: int, name: str, layout: Layout | None = None) -> Run:
        """Return a copy of a run as if it had ended after a step, resumed to its end."""
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
        return train(config, self._environ, io.StringIO(), resume=Resume(copy))


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    path = folder / "checkpoints" / step_name(step) / MANIFEST
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _digest(folder: Path, step: int) -> str:
    return f"step {step}: {_manifest(folder, step)['digest'][:16]}"


def _first_difference(whole: Path, resumed: Path, at: tuple[int, ...]) -> str | None:
    """Return what first differs between two runs' steps, None where nothing does."""
    for step in at:
        expected, found = _manifest(whole, step), _manifest(resumed, step)
        if not any(name.startswith("weights-") for name in expected["files"]):
            return f"step {step} holds no weights"
        for name, file in expected["files"].items():
            if found["files"].get(name) != file:
                return f"{name} of step {step} differs"
        for fact in _FACTS:
            if found[fact] != expected[fact]:
                return f"{fact} of step {step} is {found[fact]}, not {expected[fact]}"
    return None


def _loss(run: Run, step: int) -> float:
    return next(float(e["loss"]) for e in run.events("step") if e["step"] == step)
