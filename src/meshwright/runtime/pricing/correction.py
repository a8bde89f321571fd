"""Derives a correction of predictions from a run's measured steps, and finds faster layouts.

`python -m meshwright.runtime.pricing.correction RUN_FOLDER` appends the result to the run's events.
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from meshwright.cost.calibration import Calibration, as_toml, calibration_named
from meshwright.cost.inputs import CostInputs
from meshwright.cost.measured import Correction, Measurement, correct
from meshwright.cost.price import price
from meshwright.cost.step import step_time
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.kernels.processor import processor
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.planner.rank import Search
from meshwright.program.events import Event, Events
from meshwright.runtime.pricing.measured import keep, kept_of_cluster
from meshwright.spec.loading import Config
from meshwright.training.events import append_event
from meshwright.training.run_folder import Job, RunFolder, read_job
from meshwright.units import format_seconds

# The first steps of a run warm up: this share of them is left out.
_WARM_UP: Final = 0.25
# By so much another layout has to be faster to be worth a word: predictions are a few percent off.
_WORTH: Final = 0.02


def corrected_event(job: Job, environ: Mapping[str, str]) -> Event:
    """Return the "measured" event: a run's correction, and a faster layout if one is predicted.

    Also stores the correction for later predictions of the same cluster.
    """
    base = uncorrected(calibration_named(None))
    try:
        measured = measurement_of(job.folder.path, base)
        correction = correct([measured])
    except ConfigError as error:  # no device that is known, or a step that nothing explains
        return {"event": "measured", "says": f"The prediction was not corrected: {error}."}
    stored_path = keep_correction(correction, job.config, environ, "a run")
    after = replace(measured.setting, calibration=applied(base, [correction]))
    own_seconds = step_time(after, after.kernels(), job.layout).total
    best = faster(after, job, own_seconds)
    return {
        "event": "measured",
        "step_time_s": measured.seconds,
        "compute": correction.compute,
        "memory": correction.memory,
        "kept": None if stored_path is None else str(stored_path),
        "faster": best,
        "says": f"Measured: {'; '.join(correction.text)}. {_words(best, own_seconds)}",
    }


def faster(setting: CostInputs, job: Job, own_seconds: float) -> dict[str, Any] | None:
    """Return a layout predicted to be at least 2% faster than the run's own, else None.

    `own_seconds` is the predicted step time of the run's layout.
    """
    ranked = Search(setting, job.layout.world).run(1).ranked
    if not ranked or ranked[0].time.total > (1 - _WORTH) * own_seconds:
        return None
    prediction = price(setting, ranked[0].layout)
    return {
        "layout": prediction.layout.label,
        "step_time_s": prediction.time.total,
        "own_step_time_s": own_seconds,
    }


def _words(best: Mapping[str, Any] | None, own_seconds: float) -> str:
    if best is None:
        return "With this, no other layout is predicted to be faster."
    saved = 1 - best["step_time_s"] / own_seconds
    return (
        f"With this, {best['layout']} is predicted to take {format_seconds(best['step_time_s'])} a "
        f"step, {saved:.0%} less than this layout."
    )


def measurement_of(path: Path, base: Calibration) -> Measurement:
    """Return a run's median step time, without warm-up steps, and its largest peak memory.

    Raises `ConfigError` if there is no run or no step.
    """
    job = read_job(path)
    try:
        events = Events.read(RunFolder(path).events)
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from None
    steps = [event for event in events if event["event"] == "step" and event["step_time_s"] > 0]
    steps = steps[int(_WARM_UP * len(steps)) + (len(steps) > 1) :]
    if not steps:
        raise ConfigError(f"{path}: the run has no step yet")
    setting = on_cluster(cost_inputs_of(job.config, base, processor=processor()), job.layout)
    peaks = [
        peak_bytes
        for event in steps
        for peak_bytes in (event.get("peak_memory_bytes") or {}).values()
    ]
    is_known = peaks and setting.traits.measures_tensors
    peak_bytes = float(max(peaks)) if is_known else None
    seconds = statistics.median(float(event["step_time_s"]) for event in steps)
    return Measurement(setting, job.layout, seconds, peak_bytes, is_allocated=True, name=str(path))


def applied(base: Calibration, corrections: Sequence[Correction]) -> Calibration:
    """Return a calibration with corrections applied, and mentioned in its source."""
    for correction in corrections:
        base = correction.applied(base)
    source = "; ".join([base.source, "corrected by what was measured"])
    return replace(base, source=source, date=_today())


def uncorrected(calibration: Calibration) -> Calibration:
    """Return a calibration without factors from earlier measurements of a cluster."""
    constants = {
        name: value
        for name, value in calibration.constants.items()
        if ".measured." not in name or name.startswith("any.")
    }
    return replace(calibration, constants=constants)


def keep_correction(
    correction: Correction, config: Config, environ: Mapping[str, str], by: str
) -> Path | None:
    """Store a correction for the config's cluster and return its file.

    `by` names what measured it. None if the cluster is this machine, or the file cannot be written.
    """
    path = kept_of_cluster(config, environ)
    if path is None:
        return None
    system, _, _ = correction.kind.partition(".")
    prefix = f"{system}."
    constants = {name.removeprefix(prefix): value for name, value in correction.constants.items()}
    text = as_toml({system: constants}, _today(), f"{by}: {'; '.join(correction.text)}")
    return path if keep(text, path) else None


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def main() -> None:
    """Run as a script: append the correction of the given run folder to its events."""
    try:
        job = read_job(Path(sys.argv[1]))
        append_event(job.folder.events, corrected_event(job, os.environ))
    except (MeshwrightError, OSError, ValueError, LookupError, ArithmeticError) as error:
        sys.exit(f"{type(error).__name__}: {error}")  # the run is none the worse


if __name__ == "__main__":
    main()
