"""The run folder: the paths of a run's files, and how it is created and read. No torch here."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ConfigError, DataError, refusal
from meshwright.files import read_text, write_atomic
from meshwright.layout import Layout, Machine
from meshwright.parsing import parse_json
from meshwright.program.profile import StepProfile, from_json, to_json
from meshwright.spec.dump import portable, to_toml
from meshwright.spec.loading import PROVENANCE, Config, load_config
from meshwright.spec.stored import StoredTokenizer, find_step, stored_spec, stored_tokenizer
from meshwright.spec.training import MOST_RANKS
from meshwright.store import Place, place
from meshwright.training.events import note


@dataclass(frozen=True)
class RunFolder:
    """The path of a run folder, and those of the files in it."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.toml"

    @property
    def plan(self) -> Path:
        """JSON file of the run's config, layout and machine, which the ranks read."""
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        """The events, one JSON object per line."""
        return self.path / "events.jsonl"

    @property
    def step_profile(self) -> Path:
        """The predicted and measured step profile, see `program.profile`."""
        return self.path / "ledger.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of saved steps, `step-00000100` and so on."""
        return self.path / "checkpoints"

    def steps_of(self, config: Config) -> Place:
        """The folder of the steps of a run with this config: its own, or `checkpoint.dir`."""
        directory = config.checkpoint.dir
        return self.checkpoints if directory is None else place(directory)

    @property
    def lock(self) -> Path:
        """The file that says which process uses the folder: see `runtime.supervise.lock`."""
        return self.path / "lock"

    def log(self, rank: int) -> Path:
        """Return the path of a rank's output."""
        return self.path / "logs" / f"rank-{rank}.log"

    def cpp_stacks(self, rank: int) -> Path:
        """Return the path of the C++ stacks of all threads of a rank that crashed."""
        return self.path / "logs" / f"rank-{rank}.stacks"

    def flight_recorder(self, rank: int) -> Path:
        """Return the path of a rank's flight recorder, see `comm.flight_recorder`."""
        return self.path / "logs" / f"rank-{rank}.recorder"

    @property
    def nccl_trace(self) -> Path:
        """The path prefix, before the rank's number, of NCCL's last collectives of a rank that
        hung.
        """
        return self.path / "logs" / "nccl-rank-"

    def failure(self, rank: int) -> Path:
        """Return the path of the exception that ended a rank, as JSON."""
        return self.path / "logs" / f"rank-{rank}.failure.json"


class RunTokenizer(NamedTuple):
    """The tokenizer of the data: its name, eos token and file (None: built in).

    `bos` are the ids at the beginning of each text.
    """

    name: str
    eos: str | None
    file: str | None
    bos: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """What a rank needs to know about its run, apart from the rendezvous; stored in `plan.json`.

    `resume`: the folder's run is resumed; `allowed` are the names of its identity (see
    `checkpoint.identity`) that may have changed. `run` is a random id, which its saved steps
    contain.
    """

    config: Config
    layout: Layout
    machine: Machine
    cache: Path
    folder: RunFolder
    tokenizer: RunTokenizer
    resume: bool = False
    allowed: tuple[str, ...] = ()
    run: str = ""

    @property
    def checkpoints(self) -> Place:
        """The folder of the run's steps."""
        return self.folder.steps_of(self.config)


def choose_folder(config: Config, started: datetime.datetime) -> RunFolder:
    """Return the run folder for a config, which must not contain a run yet.

    `started` gives its name unless the config does. Raises `ConfigError` if it contains a run, or
    cannot be written.
    """
    root = Path(config.log.dir)
    name = config.log.name
    if name is not None and (Path(name).name != name or name in ("", ".", "..")):
        raise ConfigError(f"log.name = {name!r} must be a plain folder name; log.dir sets where")
    path = root / (name or unused_name(root, started.strftime("run-%Y%m%d-%H%M%S")))
    check_links(path)
    if path.is_dir() and any(entry.name != "lock" for entry in path.iterdir()):
        legal = [f"log.name = {unused_name(root, path.name)}"]
        hint = f"To continue that run: meshwright train --resume {shlex.quote(str(path))}"
        rule = f"run folder {path} already holds a run"
        raise ConfigError(refusal(rule, legal=legal, hint=hint))
    check_writable("run folder", path, "log.dir")
    return RunFolder(path)


def resumed_folder(run: Path) -> RunFolder:
    """Return the folder of a run to resume; raise `ConfigError` if it contains no run."""
    folder = RunFolder(run.resolve())
    if not folder.plan.is_file() or not folder.config.is_file():
        raise ConfigError(f"--resume {run}: not a run folder, {folder.plan} is missing")
    check_links(folder.path)
    check_writable("run folder", folder.path, "log.dir")
    return folder


def compiled_as(config: Config, folder: RunFolder) -> Config:
    """Return `config` with `train.compile`, if it is "auto", as in the run that is resumed."""
    if config.train.compile != "auto":
        return config
    before = load_config(folder.config).train.compile
    # A run has "auto" where nothing was measured: it was not compiled.
    train = config.train.model_copy(update={"compile": before is True})
    origins = {**config.origins, "train.compile": f"as in {folder.config}"}
    return config.model_copy(update={"train": train, "origins": origins})


def other_name(config: Config) -> str | None:
    """Return an unused `log.name` if the config's names an existing run, else None."""
    root, name = Path(config.log.dir), config.log.name
    if name is None or not (root / name).exists():
        return None
    return unused_name(root, name)


def unused_name(root: Path, name: str) -> str:
    """Return a name like the given one that no run in a folder has."""
    # A name has 255 bytes at most; what is cut is not part of a character.
    base = name.encode()[: 255 - len("-999")].decode(errors="ignore")
    candidates = [name, *(f"{base}-{n}" for n in range(2, 1000))]
    return next(c for c in candidates if not (root / c).exists())


def check_links(path: Path) -> None:
    """Raise `ConfigError` if files in a run folder are links: a run would write to their targets.

    Folders in it may be links, for example to another disk.
    """
    for folder in (path, RunFolder(path).log(0).parent):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if entry.is_symlink() and not entry.is_dir():
                rule = f"{entry} is a link, and a run writes no file through one"
                raise ConfigError(refusal(rule, hint="Put a copy of the file in its place"))


def check_writable(label: str, path: Path, key: str) -> None:
    """Raise `ConfigError` if a folder is not writable, with the system's reason and the config
    `key`.

    Missing folders are created for the check, and removed after it.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        for folder in missing:
            folder.rmdir()
    except OSError as error:
        raise ConfigError(
            f"{label} {path} cannot be written: {error.strerror}; set {key}"
        ) from None


def create(job: Job) -> None:
    """Write a run's config, its provenance and the plan, and link `latest` next to it to
    the run.
    """
    folder = job.folder
    folder.log(0).parent.mkdir(parents=True, exist_ok=True)
    origins = _first_origins(job)
    _write(folder.config, to_toml(portable(job.config)))
    _write(folder.path / PROVENANCE, _json(origins))
    plan = {
        "config": job.config.model_dump(mode="json"),
        "layout": job.layout.model_dump(mode="json"),
        "machine": job.machine._asdict(),
        "cache": str(job.cache),
        "tokenizer": job.tokenizer._asdict(),
        "resume": job.resume,
        "allowed": list(job.allowed),
        "run": job.run,
    }
    if job.tokenizer.file is not None:  # the run can be sampled from wherever it is moved
        template = job.config.data.chat_template
        template_file = None if template is None else Path(template)
        from meshwright.data.hf_tokenizer import copy_tokenizer  # numpy, which plans do without

        copy_tokenizer(Path(job.tokenizer.file), folder.path, template_file)
    _write(folder.plan, _json(plan))
    latest = folder.path.parent / "latest"
    with contextlib.suppress(OSError):  # a file system without links: only a convenience is lost
        if latest.is_symlink() or not latest.exists():
            temporary = latest.with_name(f".latest-{os.getpid()}")
            temporary.symlink_to(folder.path.name)
            temporary.replace(latest)


def _first_origins(job: Job) -> dict[str, str]:
    """Return where each value of a config came from; for a resumed run, those of its first start.

    A resumed run reads its own `config.toml`, which has every key, also those that were defaults.
    """
    origins = dict(job.config.origins)
    try:
        first = parse_json(read_text(job.folder.path / PROVENANCE))
    except (OSError, ValueError):  # a new run, or a damaged file
        return origins
    from_run = f"{job.folder.config.name}:"
    for key in origins if isinstance(first, Mapping) else ():
        if origins[key].startswith(from_run) and isinstance(first.get(key), str):
            origins[key] = first[key]
    return origins


def restore(job: Job) -> None:
    """Write a run's config and plan again, with a note, if they are missing, damaged or changed.

    For a restart, whose ranks read them.
    """
    with contextlib.suppress(ConfigError):
        stored = read_job(job.folder.path)
        if (stored.layout, stored.run) == (job.layout, job.run):
            return
    note(f"{job.folder.plan} or {job.folder.config} was removed or damaged: both are written again")
    create(job)


def put_step(folder: RunFolder, profile: StepProfile) -> None:
    """Add a step profile to a run's `ledger.json`, replacing one of the same source.

    A disk error only prints a note, since a run can continue without the file.
    """
    path = folder.step_profile
    before: tuple[StepProfile, ...] = ()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or damaged
        before = from_json(parse_json(read_text(path)))
    profiles = [*(stored for stored in before if stored.source != profile.source), profile]
    try:
        write_atomic(path, (json.dumps(to_json(profiles), separators=(",", ":")) + "\n").encode())
    except DataError as error:
        note(str(error))


def read_job(path: Path) -> Job:
    """Return the job that `create` wrote into a run folder; raise `ConfigError` if there is
    none.
    """
    folder = RunFolder(path)
    if not folder.plan.is_file():
        raise ConfigError(f"{path} is not a run folder: {folder.plan} is missing")
    config = load_config(folder.config)
    with _readable(folder.plan):
        plan = parse_json(read_text(folder.plan))
        layout = Layout(**plan["layout"])
        if layout.world > MOST_RANKS:
            raise ValueError(f"a layout of {layout.world} ranks")
        return Job(
            config=config,
            layout=layout,
            machine=Machine(**plan["machine"]),
            cache=Path(plan["cache"]),
            folder=folder,
            tokenizer=RunTokenizer(**plan["tokenizer"]),
            resume=plan["resume"],
            allowed=tuple(plan["allowed"]),
            run=plan.get("run", ""),  # version 0.1 gave none
        )


@contextlib.contextmanager
def _readable(plan: Path) -> Iterator[None]:
    """Within this context, turn the errors of a damaged plan into a `ConfigError` that names it."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{plan} is damaged: it cannot be read as a run's plan") from error


def _write(path: Path, text: str) -> None:
    """Write a file atomically; a link at this path is replaced, not followed."""
    write_atomic(path, text.encode())


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def tokenizer_of(path: Path) -> StoredTokenizer:
    """Return the tokenizer of a run, step or Hugging Face folder.

    Raises `ConfigError` if the folder does not name one.
    """
    if not path.is_dir() and find_step(path) is None:
        raise ConfigError(f"{path} is not a folder")
    tokenizer = stored_tokenizer(path)
    if tokenizer is not None:
        return tokenizer
    stored_spec(path)  # a folder of no model, or of one that is not supported, says so
    raise ConfigError(f"{path} does not say which tokenizer it was trained with; give --tokenizer")
