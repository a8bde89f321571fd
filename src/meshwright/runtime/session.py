"""`train`: from a config to a finished run. Checks it, creates the run folder, starts the ranks."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO

from meshwright.checkpoint.commit import LOCK, steps
from meshwright.comm.rendezvous import Rendezvous
from meshwright.data import open_data
from meshwright.data.dataset import check_sources
from meshwright.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    ConfigError,
    StoppedOnRequest,
    refusal,
)
from meshwright.layout import Machine, left_over, resolve_layout, with_padding
from meshwright.lines import GOES_ON, fitted
from meshwright.parsing import parse_json
from meshwright.report.run_page import write_report
from meshwright.runtime.checks.elastic import check_elastic
from meshwright.runtime.checks.epochs import fine_tuning_words, with_epochs
from meshwright.runtime.checks.notes import check_room, run_notes
from meshwright.runtime.checks.start import (
    Resume,
    allow_open_files,
    check_device,
    check_extras,
    check_limit,
    check_memory,
    check_tokenizer,
    resumed,
    resumed_folder_with_steps,
)
from meshwright.runtime.machines.engine import check_async_tp, check_engine, check_fp8
from meshwright.runtime.machines.gather import hand_over, logged, one_folder
from meshwright.runtime.machines.machine import (
    check_compiler,
    detect,
    find_gpus,
    lacks_compiler,
    on_nodes,
)
from meshwright.runtime.measure.measuring import measured_first
from meshwright.runtime.pricing.measured import user_cache
from meshwright.runtime.pricing.planned import predicted, settled
from meshwright.runtime.ranks.fault import Fault
from meshwright.runtime.ranks.local import LocalRun, gpu_environ
from meshwright.runtime.run import Run
from meshwright.runtime.supervise.attempts import (
    cut_short,
    forget,
    going_on,
    recorded,
    restarted,
    tell,
)
from meshwright.runtime.supervise.crash_records import trace_files
from meshwright.runtime.supervise.lock import RunLock
from meshwright.runtime.supervise.supervisor import (
    StopSignals,
    Timing,
    listen_on_loopback,
    worker_command,
)
from meshwright.runtime.supervise.view import Lasting, open_view
from meshwright.spec.hub import folder_with_weights
from meshwright.spec.loading import Config
from meshwright.store import StorePath
from meshwright.training.events import Callbacks, Emit, Sink, append_event
from meshwright.training.in_store import check_store, publish
from meshwright.training.run_folder import (
    Job,
    RunFolder,
    RunTokenizer,
    check_writable,
    choose_folder,
    compiled_as,
    create,
    put_step,
    read_job,
)

Progress = Callable[[str], None]


_NO_SECRET: Final = (
    "the ranks have no secret, so whoever reaches their store can join them: set MESHWRIGHT_SECRET "
    "on all nodes, as the jobs of `meshwright launch` do"
)


def train(
    config: Config,
    environ: Mapping[str, str] | None = None,
    out: TextIO = sys.stdout,
    timing: Timing | None = None,
    command: Callable[[RunFolder], list[str]] = worker_command,
    resume: Resume | None = None,
    *,
    quiet: bool = False,
    callbacks: Sequence[Emit] = (),
) -> Run:
    """Train a config and return its run; with `resume`, continue an existing run.

    Starts the local ranks, and restarts them if they fail, or joins those that torchrun has
    started. `environ` defaults to this process's environment. `out` receives the terminal view;
    `quiet` shows little more than problems. `command` returns the command line of a rank.
    `callbacks` are called in this process (under torchrun, in that of rank 0) with each event of
    the run as it happens, a dict as in `events.jsonl`. Raises `ConfigError`, `DataError` or
    `CheckpointError` before any process starts, `RankFailed` if a failed rank cannot be restarted,
    `NoProgress` if ranks fail repeatedly.
    """
    environ = dict(os.environ) if environ is None else environ
    if "FAULT" in environ:
        Fault.parse(environ["FAULT"])

    def show(out: Lasting) -> Sink:
        return Callbacks(open_view(out, quiet=quiet), callbacks)

    rendezvous = Rendezvous.from_environment(environ)
    if rendezvous is not None:
        return _train_joined(config, rendezvous, environ, resume, show)
    job = prepare_job(config, environ, resume=resume)
    listener, shown = listen_on_loopback(config.cluster.port), Lasting(out)
    with contextlib.ExitStack() as stack, StopSignals() as signals:
        locks = locked(job, stack)
        notes = list(run_notes(job, environ))  # before a run that goes on gets its new config
        _create(job)
        _say(shown, f"run folder {job.folder.path}")
        if (before := locks[0].left_by) is not None:
            _say(shown, f"note: process {before['pid']} had it and is gone without an end")
        for text in notes:
            _say(shown, f"note: {text}")
        local = LocalRun(job, environ, locks, timing or Timing(), command(job.folder))
        try:
            code = local.train(listener, show(shown), signals)
        except StoppedOnRequest as stopped:
            code = stopped.exit_code
            append_event(job.folder.events, cut_short(job))
            _say(shown, str(stopped))
        finally:
            if not any(lock.is_lost for lock in locks):
                _write_report(job, shown)
        if code == EXIT_STOPPED:
            _say(Lasting(sys.stderr) if shown.is_lost else shown, going_on(job), GOES_ON)
        return Run(job.folder.path, code)


def prepare_job(
    config: Config,
    environ: Mapping[str, str],
    rendezvous: Rendezvous | None = None,
    resume: Resume | None = None,
) -> Job:
    """Return the job of a run, after preparing its data and all checks possible before ranks start.

    Raises `ConfigError`, `DataError` or `CheckpointError` naming the rule, the value and the
    alternatives.
    """
    machine = detect(config.cluster, environ, rendezvous)
    check_device(config, machine, environ)
    before = None if resume is None else resumed_folder_with_steps(config, resume)
    folder = before or choose_folder(config, datetime.datetime.now())
    cache, lacks = cache_folder(config, environ), lacks_compiler(machine.device, environ)
    _check_inputs(config, machine, folder, cache, lacks)
    config = measured_first(config, environ)  # takes seconds: cheap checks come first
    if before is not None:
        config = compiled_as(config, before)
    config = settled(config, machine, lacks)
    layout = resolve_layout(config, machine)
    allow_open_files(layout)
    config = with_padding(config, layout)
    check_compiler(config.train, lacks)
    check_engine(config, layout, resumes=resume is not None)
    check_elastic(config, layout, machine.device, rendezvous)
    check_async_tp(config, layout, machine.device, find_gpus(environ))
    check_memory(config, layout, machine)
    check_limit(config, layout, machine)
    say = _progress_to(sys.stderr)
    for stored in filter(None, (config.model.init_from, config.lora.init_from)):
        folder_with_weights(stored, say)  # once on each node: ranks find it in the cache
    dataset = open_data(config.data, cache, vocab_size=config.model.vocab_size, progress=say)
    config = with_epochs(config, dataset)
    for line in [*dataset.check(config.train), fine_tuning_words(config, dataset)]:
        if line is not None:
            say(line)
    tokenizer = dataset.tokenizer
    file = None if tokenizer.file is None else str(tokenizer.file)
    record = RunTokenizer(tokenizer.name, tokenizer.eos_token, file, tokenizer.bos_ids)
    job = Job(config, layout, machine, cache, folder, record, run=secrets.token_hex(8))
    if resume is not None:
        return resumed(job, dataset, resume)
    _refuse_steps(job)
    return job


def _check_inputs(
    config: Config, machine: Machine, folder: RunFolder, cache: Path, lacks: str | None
) -> None:
    """Raise for missing files or packages, or too little disk space for a step.

    These checks need no measurement and read no data, so they come first.
    """
    check_tokenizer(config)
    check_extras(config)
    check_fp8(config, machine.device)
    check_compiler(config.train, lacks)
    check_sources(config.data, cache, config.model.vocab_size)
    root = folder.steps_of(config)
    if isinstance(root, StorePath):
        check_store(root)
    elif config.checkpoint.dir is not None:  # its own folder is in that of the run
        check_writable("checkpoint folder", root, "checkpoint.dir")
    check_room(config, root)


def _refuse_steps(job: Job) -> None:
    """Raise `ConfigError` if the checkpoint folder of a new run has steps of another run."""
    if steps(job.checkpoints):
        raise ConfigError(_taken(job))


def locked(job: Job, stack: contextlib.ExitStack) -> list[RunLock]:
    """Lock the run folder and the checkpoint folder of a job for as long as `stack` is open.

    Raises `ConfigError` if another run holds a lock, or has saved steps in the checkpoint folder.
    """
    locks = [RunLock(job.folder.lock, job.run)]
    root = job.checkpoints  # a store has no locks: `commit.claim` lets the last process write
    if isinstance(root, Path) and root.resolve() != job.folder.path.resolve():  # else they have one
        locks.append(RunLock(root / LOCK, job.run, "checkpoint folder"))
    for lock in locks:
        stack.enter_context(lock)
    if not job.resume:
        _refuse_steps(job)
    return locks


def _taken(job: Job) -> str:
    """Return a message that a checkpoint folder belongs to another run, and how to resume it."""
    run, suffix = "RUN, RUN being its run folder", ""
    for plan in sorted(Path(job.config.log.dir).glob("*/plan.json")):
        with contextlib.suppress(ConfigError, OSError):  # a damaged run, or one without steps
            other_job = read_job(plan.parent)
            is_same = other_job.checkpoints.resolve() == job.checkpoints.resolve()
            if not plan.parent.is_symlink() and is_same:
                run, wanted = shlex.quote(str(plan.parent)), job.config.train.steps
                suffix = f" train.steps={wanted}" if wanted != other_job.config.train.steps else ""
    return (
        f"checkpoint.dir = {job.checkpoints} holds steps of another run. For a new run choose "
        f"another folder; to resume that one: meshwright train --resume {run}{suffix}"
    )


def cache_folder(config: Config, environ: Mapping[str, str]) -> Path:
    """Return the folder for prepared data and downloads: `data.cache`, or the user's cache."""
    if config.data.cache is not None:
        return Path(config.data.cache)
    return user_cache(environ)


def _train_joined(
    config: Config,
    rendezvous: Rendezvous,
    environ: Mapping[str, str],
    resume: Resume | None,
    show: Callable[[Lasting], Sink],
) -> Run:
    """Train in this process, one of the ranks of a launcher; rank 0 prepares the run for all."""
    config = on_nodes(config, rendezvous)
    machine = _as_rank(config, rendezvous, environ)
    # Only here, where this process is a rank itself: a supervisor never needs torch.
    from meshwright.comm.world import join
    from meshwright.runtime.ranks.worker import (
        StopRequest,
        follow_parent,
        open_flight_recorder,
        record_failure,
        run_rank,
    )

    stop = StopRequest()
    stop.listen()
    follow_parent(environ)
    # Before the ranks meet: a layout that is not legal. What else is decided, rank 0 decides.
    plain = config.train.model_copy(update={"compile": False})
    resolve_layout(settled(config.model_copy(update={"train": plain}), machine), machine)
    world = join(rendezvous, machine.device, config.cluster.timeout)
    rendezvous = replace(rendezvous, rank=world.rank)  # its number in the mesh from here on
    with contextlib.ExitStack() as stack:

        def prepare() -> str:
            return hand_over(_taken_up(config, rendezvous, environ, resume, stack))

        gathering = one_folder(world, parse_json(world.from_rank_0("meshwright/run", prepare)))
        job = read_job(gathering.folder.path)
        _check_world(job, rendezvous)
        _take_up_logs(job, rendezvous, environ)
        world = replace(world, recorder=open_flight_recorder(job.folder, rendezvous, environ))
        is_failure, out = True, Lasting(sys.stdout)
        try:
            with logged(job.folder.log(rendezvous.rank), stdout=rendezvous.rank != 0):
                view = show(out) if rendezvous.rank == 0 else None
                code = run_rank(job, world, rendezvous.attempt, stop, environ, view=view)
            is_failure = False
        except BaseException as error:
            record_failure(job.folder, rendezvous.rank, error, world.recorder)
            raise
        finally:
            if rendezvous.rank in gathering.apart:
                gathering.send(rendezvous.rank)
            if rendezvous.rank == 0:
                for rank in gathering.collect(is_failure=is_failure):
                    _say(out, f"note: rank {rank} on {world.node(rank)} has sent no log")
                _write_report(job, out)
        if rendezvous.rank == 0 and code == EXIT_STOPPED:
            _say(out, going_on(job, rendezvous), GOES_ON)
        if rendezvous.rank == 0 and code == EXIT_DONE:  # a job that was stopped comes back
            forget(job, rendezvous)
    return Run(job.folder.path, code)


def _as_rank(config: Config, rendezvous: Rendezvous, environ: Mapping[str, str]) -> Machine:
    """Return the machine of this rank, and on a GPU set the environment variables of ranks."""
    machine = detect(config.cluster, environ, rendezvous)
    if machine.device == "cuda":  # before torch reads it
        os.environ.update(gpu_environ(environ, machine.threads(rendezvous.local_size)))
    return machine


def _take_up_logs(job: Job, rendezvous: Rendezvous, environ: Mapping[str, str]) -> None:
    """Direct a rank's failure record, and on a GPU NCCL's flight record, to the run folder.

    torch reads the environment variable for this when it writes the record, after a time-out.
    """
    job.folder.failure(rendezvous.rank).unlink(missing_ok=True)
    if job.machine.device == "cuda":
        os.environ.update(trace_files(job.folder, environ))


def _taken_up(
    config: Config,
    rendezvous: Rendezvous,
    environ: Mapping[str, str],
    resume: Resume | None,
    stack: contextlib.ExitStack,
) -> Job:
    """Return the job of ranks that a launcher has started; `stack` locks its folders.

    A restarted attempt continues the run of the previous one, on another layout if the number of
    ranks has changed.
    """
    folder = recorded(config, rendezvous, lambda text: _say(sys.stdout, text))
    before = None if folder is None else read_job(folder)
    if before is not None and before.layout.world == rendezvous.size:
        locked(replace(before, resume=True), stack)
        append_event(before.folder.events, restarted(before, rendezvous))
        return before
    job = prepare_job(config, environ, rendezvous, resume if folder is None else Resume(folder))
    locked(job, stack)
    unproved = [] if rendezvous.secret else [_NO_SECRET]
    for text in (*unproved, *run_notes(job, environ)):
        _say(sys.stdout, f"note: {text}")
    _create(job)
    tell(job, config, rendezvous)
    if before is not None:
        append_event(job.folder.events, restarted(before, rendezvous))
    return job


def _check_world(job: Job, rendezvous: Rendezvous) -> None:
    """Raise `ConfigError` if the number of started ranks is not that of the layout."""
    if job.layout.world != rendezvous.size:
        problem = (
            f"the layout {job.layout.label} has {job.layout.world} ranks, and "
            f"{rendezvous.size} started"
        )
        unused = left_over(job.config, job.layout, rendezvous.size)
        reason, legal = (
            (f": {unused.reason}", unused.legal) if unused else ("", ("another layout",))
        )
        raise ConfigError(refusal(problem + reason, legal=[f"{job.layout.world} ranks", *legal]))


def _create(job: Job) -> None:
    """Create the run folder, and with `log.trace` write the predicted step profile into it."""
    create(job)
    publish(job)
    if job.config.log.trace and (prediction := predicted(job)) is not None:
        put_step(job.folder, prediction)


def _say(out: TextIO | Lasting, text: str, joint: str = "") -> None:
    out.write(f"{fitted(text, out, joint=joint)}\n")
    out.flush()


def _progress_to(out: TextIO) -> Progress:
    return lambda text: _say(out, text)


def summarise(run: Run) -> Mapping[str, Any]:
    """Return the outcome of a run, such as its last step and loss, as a JSON-ready dict."""
    steps = list(run.events("step"))
    start = next(run.events("start"), {})
    return {
        "run": str(run.folder),
        "exit_code": run.exit_code,
        "steps": steps[-1]["step"] if steps else 0,
        "loss": steps[-1]["loss"] if steps else None,
        "unigram_entropy": start.get("unigram_entropy"),
    }


def _write_report(job: Job, out: TextIO | Lasting) -> None:
    """Write the run's HTML page; if this fails, only print a note."""
    try:
        _say(out, f"report {write_report([job.folder.path])}")
    except Exception as error:  # a page is never a reason for a run to fail
        _say(out, f"note: no report was written: {type(error).__name__}: {error}")
