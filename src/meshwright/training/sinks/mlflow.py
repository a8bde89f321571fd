"""MLflow: one run of an experiment, continued when the run is resumed.

MLflow generates run ids itself. The run is found by a tag, so no file needs to store the id. The
server comes from MLflow's own settings, such as MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from meshwright.training.sinks.base import Opened, TrackedRun

_TAG: Final = "meshwright.run"
# The parameters that MLflow takes at once, and the characters of a value that all its stores take.
_AT_ONCE: Final = 100
_LONGEST: Final = 500


def open_tracker(run: TrackedRun) -> Opened:
    """Open or continue the MLflow run, whose parameters are the config of the first start.

    MLflow's parameters cannot change, so a resumed run keeps them.
    """
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(run.setting)
    number = experiment.experiment_id if experiment else client.create_experiment(run.setting)
    known = client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{run.identity}'")
    if known:
        tracked = known[0].info.run_id
        client.update_run(tracked, status="RUNNING")
    else:
        tags = {_TAG: run.identity}
        tracked = client.create_run(number, tags=tags, run_name=run.name).info.run_id
        parameters = [mlflow.entities.Param(key, value) for key, value in _flat(run.config)]
        for start in range(0, len(parameters), _AT_ONCE):
            client.log_batch(tracked, params=parameters[start : start + _AT_ONCE])

    def write(numbers: Mapping[str, float], step: int) -> None:
        stamp = int(time.time() * 1000)
        metrics = [
            mlflow.entities.Metric(name, value, stamp, step) for name, value in numbers.items()
        ]
        client.log_batch(tracked, metrics=metrics)

    return Opened(write, lambda: client.set_terminated(tracked))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as a string) for the config values that are not None."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)[:_LONGEST]
