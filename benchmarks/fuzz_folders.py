"""What `benchmarks.fuzz` damages of folders: models of ours and of Hugging Face, and runs."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fuzz import Reader
from meshwright.checkpoint.adapters import AdapterSource, write_adapter
from meshwright.checkpoint.commit import MANIFEST, digest_of, fingerprint, step_name
from meshwright.checkpoint.inspect import inspect
from meshwright.checkpoint.tensors import Stored
from meshwright.checkpoint.weights import load_model, write_weights
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.errors import ConfigError
from meshwright.models import build_model, init_model
from meshwright.models.hf import INDEX, load_hf, save_hf
from meshwright.program.profile import to_json
from meshwright.program.shards import whole
from meshwright.report.run_page import report
from meshwright.runtime.certificate import BOUNDS, first_difference, on_another
from meshwright.runtime.pricing.planned import predicted
from meshwright.runtime.session import Run, prepare_job
from meshwright.runtime.supervise.diagnosis import diagnose
from meshwright.runtime.supervise.disk import runs_of
from meshwright.spec.loading import load_config
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.stored import stored_spec, stored_tokenizer
from meshwright.training.run_folder import create, read_job

SMALL: Final = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "context": 64}
TINY: Final = (
    *("model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1"),
    *("train.batch=4", "train.seq_len=32", "train.steps=4", "cluster.device=cpu"),
)


def make_folders(folder: Path) -> list[Reader]:
    """Return the readers of folders; their examples are made beside a text of `make_readers`."""
    return [*_models(folder), *_runs(folder)]


def files_of(root: Path) -> dict[str, bytes]:
    """Return the contents of all files of a folder, by their path in it."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def _models(folder: Path) -> list[Reader]:
    """Folders of Hugging Face, and steps of ours."""
    spec = model_spec(**SMALL, vocab_size=300)
    model = init_model(build_model(spec, device="cpu"), spec, seed=0)
    save_hf(model, folder / "hf")
    save_hf(model, folder / "cut", max_shard_bytes=40_000)
    hf, cut = files_of(folder / "hf"), files_of(folder / "cut")
    write_weights(folder / "run/checkpoints", model.spec, dict(model.named_parameters()), {})
    steps = files_of(folder / "run")
    tensors = next(name for name in steps if name.endswith(".safetensors"))
    own = Path(tensors).name

    def chunks(at: Path) -> None:
        found = Stored([at / own])
        for name in found.names:
            found.whole(name)

    def step(at: Path) -> None:
        inspect(at, verified=True)
        load_model(at)

    return [
        Reader("hf folder", hf, ("config.json",), _hf),
        Reader("hf index", cut, (INDEX,), _hf),
        Reader(
            "hf safetensors", hf, ("model.safetensors",), _hf, _seal_header("model.safetensors")
        ),
        Reader("step safetensors", {own: steps[tensors]}, (own,), chunks, _seal_header(own)),
        Reader("step folder", steps, tuple(steps), step, _seal_step),
        _certificate(folder, steps),
        _adapters(folder),
    ]


def _adapters(folder: Path) -> Reader:
    """A folder of PEFT's with the first adapters of a run."""
    words = (*TINY, "lora.rank=4", "lora.targets=q_proj")
    spec = load_config(None, words).model
    write_adapter(init_model(build_model(spec, device="cpu"), spec, seed=0), folder / "peft", None)
    files = files_of(folder / "peft")

    def read(at: Path) -> None:
        spec = load_config(None, [*TINY, f"lora.init_from={at}"]).model
        source = AdapterSource(at, spec)
        for part in parts(spec):
            if part.is_adapter:
                source(part.name, part.shape, whole(part.shape))

    return Reader("adapters", files, tuple(files), read)


def _certificate(folder: Path, steps: Mapping[str, bytes]) -> Reader:
    """Two runs that a resume certificate compares, the second of them damaged."""
    for run, step in itertools.product(("whole", "other"), (5, 8)):
        at = folder / "certificate" / run / "checkpoints" / step_name(step)
        at.mkdir(parents=True)
        for name, content in steps.items():
            if "/step-" in name:
                (at / Path(name).name).write_bytes(content)
        weights = (at / "weights-00000.safetensors").read_bytes()
        (at / "optimizer-00000.safetensors").write_bytes(weights)
        manifest = json.loads((at / MANIFEST).read_text())
        manifest["files"]["optimizer-00000.safetensors"] = {}
        manifest |= {"step": step, "samples": 4 * step, "tokens": 128 * step, "loss_scale": None}
        (at / MANIFEST).write_text(json.dumps(manifest))
        told = [
            {"event": kind, "step": n, "loss": 5.0} for kind in ("step", "eval") for n in (6, 7, 8)
        ]
        (at.parents[1] / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in told))
    _seal_resumed(folder / "certificate")
    files = files_of(folder / "certificate")
    aims = tuple(name for name in files if name.startswith("other") and "model.json" not in name)

    def read(at: Path) -> None:
        whole, other = Run(at / "whole", 0), Run(at / "other", 0)
        first_difference(whole.folder, other.folder, (8,))
        for verdict in on_another(whole, other, {}, BOUNDS["fp32"]):
            json.dumps(verdict.as_dict())

    return Reader("certificate", files, aims, read, _seal_resumed)


def _seal_resumed(at: Path) -> None:
    for step in at.glob("*/checkpoints/step-*"):
        _seal(step)


def _hf(at: Path) -> None:
    stored_spec(at)
    stored_tokenizer(at)
    load_hf(at)


def _seal_header(name: str) -> Callable[[Path], None]:
    """Return what makes the length of a header true again."""

    def seal(at: Path) -> None:
        data = (at / name).read_bytes()
        end = data.index(b"}}") + 2 if b"}}" in data else data.rindex(b"}") + 1
        text = data[8:end]
        (at / name).write_bytes(struct.pack("<Q", len(text)) + text + data[end:].lstrip(b" "))

    return seal


def _seal_step(at: Path) -> None:
    (folder,) = (at / "checkpoints").glob("step-*")
    _seal(folder)


def _seal(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        if Path(name).name == name:  # no device, which has no end
            entry |= fingerprint(folder / name)._asdict()
    manifest.pop("digest", None)
    manifest["digest"] = digest_of([json.dumps(manifest, sort_keys=True)])
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _runs(folder: Path) -> list[Reader]:
    """Run folders: config, plan, events, step profiles, flight recorders, lock, failures."""
    text = folder / "text/a.txt"
    where = [f"data.source={text}", f"data.cache={folder / 'cache'}", f"log.dir={folder / 'runs'}"]
    words = [*TINY, *where, "log.name=run", "layout.dp_replicate=2"]
    job = prepare_job(load_config(None, words), {**os.environ})
    create(job)
    at = job.folder
    at.events.write_text("".join(json.dumps(event) + "\n" for event in _events()))
    found = predicted(job)
    assert found is not None
    at.step_profile.write_text(json.dumps(to_json([found])))
    at.lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "time": 1.79e9}))
    failure = {
        "rank": 0,
        "time": 1.79e9,
        "type": "RuntimeError",
        "message": "no",
        "place": "step 1",
    }
    failure |= {"expected": False, "exit_code": 3, "out_of_memory": False, "traceback": "..."}
    at.failure(0).write_text(json.dumps(failure))
    for rank in (0, 1):
        FlightRecorder.open(at.flight_recorder(rank), rank, 2, 0).phase("load")
    run = files_of(at.path)
    names = tuple(name for name in run if not name.endswith(".recorder"))
    recorders = tuple(name for name in run if name.endswith(".recorder"))
    pages = tuple(name for name in names if name in ("events.jsonl", "ledger.json"))

    def read(at: Path) -> None:
        problems = []
        for what in (report, _diagnosis):
            try:
                what([at])
            except ConfigError as error:
                problems.append(error)
        runs_of(at.parent)
        read_job(at)

    return [
        Reader("events.jsonl", run, pages, lambda at: report([at])),
        Reader("run folder", run, names, read),
        Reader("flight recorder", run, recorders, lambda at: _diagnosis([at])),
    ]


def _diagnosis(paths: Sequence[Path]) -> None:
    found = diagnose(paths[0])
    json.dumps(found.as_dict())


def _events() -> list[Mapping[str, Any]]:
    start = {"event": "start", "time": 1.79e9, "from_step": 0, "steps": 4, "world": 2}
    start |= {"device": "CPU", "parameters": 1234, "unigram_entropy": 3.1, "torch": "2.13.0"}
    steps = [
        {
            "event": "step",
            "step": step,
            "loss": 5.0 - step / 4,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "step_time_s": 0.1,
            "tokens_per_s": 10240.0,
            "tokens_per_s_per_device": 5120.0,
            "tflops_per_device": 0.02,
            "mfu": None,
            "peak_memory_bytes": {"0": 400, "1": 401},
            "data_time_share": 0.01,
        }
        for step in range(1, 5)
    ]
    restart = {"event": "restart", "time": 1.79e9, "cause": "rank 1 was killed", "detect_s": 0.1}
    restart |= {"attempt": 1, "from_step": 2, "lost_steps": 1}
    slow = {
        "event": "slow_rank",
        "time": 1.79e9,
        "rank": 1,
        "waited_s": 2.0,
        "step": 3,
        "share": 0.6,
    }
    end = {"event": "end", "time": 1.79e9, "step": 4, "loss": 4.0, "stopped": False}
    evaluation = {"event": "eval", "step": 4, "loss": 5.1, "seconds": 0.2}
    return [start, *steps, evaluation, restart, slow, end]
