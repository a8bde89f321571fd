"""`meshwright launch`: writes a training job for torchrun, Slurm, Ray, SkyPilot or Kubernetes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from meshwright.cli.common import add_config_arguments, read_words, say_line
from meshwright.errors import EXIT_DONE, ConfigError, refusal
from meshwright.files import read_text, write_atomic
from meshwright.layout import Machine, left_over, resolve_layout
from meshwright.planner.plan import cost_inputs_of
from meshwright.planner.saved import load_planned
from meshwright.runtime.jobs.job import JobSpec, local, parse_time, torchrun
from meshwright.runtime.jobs.manifests import jobset, pytorchjob, skypilot
from meshwright.runtime.jobs.on_ray import ray_job
from meshwright.runtime.jobs.on_ray import submit as submit_to_ray
from meshwright.runtime.jobs.slurm import slurm, submit
from meshwright.spec.loading import Config, load_config
from meshwright.spec.words import is_default_corpus, unnamed_inputs

_KUBERNETES: Final = {"jobset": jobset, "pytorchjob": pytorchjob}
# SkyPilot's names of devices, by the catalogue's.
_CLOUDS: Final = {
    "v100-16gb": "V100",
    "v100-32gb": "V100-32GB",
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100-pcie": "H100",
    "h100-sxm": "H100",
    "h200": "H200",
    "b200": "B200",
    "l4": "L4",
    "l40s": "L40S",
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
    "mi300x": "MI300X",
}
# The options of `launch`, each with what argparse takes; a target names those that it reads.
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "--nodes": {"type": int, "metavar": "N", "help": "instead of cluster.nodes"},
    "--restarts": {"type": int, "default": 3, "metavar": "N", "help": "after failures (3)"},
    "--hosts": {"nargs": "+", "default": [], "metavar": "HOST", "help": "the nodes"},
    "--time": {"default": "24h", "metavar": "T", "help": "limit: 90m, 24h, 2d"},
    "--partition": {},
    "--account": {},
    "--submit": {"action": "store_true", "help": "hand it to the scheduler; Ray: to its end"},
    "--address": {"default": "auto", "help": "of the cluster; local: a new one (auto)"},
    "--wait": {"default": "10m", "metavar": "T", "help": "for room there (10m)"},
    "--cpus": {"type": int, "metavar": "N", "help": "cores of each rank"},
    "--grace": {"default": "3m", "metavar": "T", "help": "for ranks to save when stopped (3m)"},
    "--accelerator": {"metavar": "NAME", "help": "the device, as H100"},
    "--setup": {"metavar": "COMMAND", "help": "runs before"},
    "--wheel": {"metavar": "FILE", "help": "Meshwright's wheel, to install"},
    "--bucket": {"dest": "volume", "metavar": "URL", "help": "keeps log.dir, e.g. s3://name/path"},
    "--volume": {"metavar": "CLAIM", "help": "a PersistentVolumeClaim with data and runs"},
    "--kind": {"choices": tuple(_KUBERNETES), "default": "jobset"},
    "--image": {"help": "a container image"},
}


class JobFormat(NamedTuple):
    """A format of jobs that `launch` writes: its help text, writer, options and submission.

    `write` returns the job's text. `submit` takes this text, the job and the arguments, and returns
    an exit code; it is None if jobs of this format cannot be submitted.
    """

    help: str
    write: Callable[[JobSpec, argparse.Namespace], str]
    options: tuple[str, ...] = ()
    submit: Callable[[str, JobSpec, argparse.Namespace], int] | None = None


def _to_slurm(text: str, job: JobSpec, args: argparse.Namespace) -> int:
    print(f"job {submit(text)}")
    return EXIT_DONE


def _to_ray(text: str, job: JobSpec, args: argparse.Namespace) -> int:
    return submit_to_ray(job, args.address, parse_time(args.wait))


_ON_NODES: Final = ("--nodes", "--restarts")
_STOPPING: Final = ("--cpus", "--grace")
FORMATS: Final[dict[str, JobFormat]] = {
    "local": JobFormat("the command for this machine", lambda job, _: local(job)),
    "torchrun": JobFormat(
        "a command for each node", lambda job, _: torchrun(job), (*_ON_NODES, "--hosts")
    ),
    "slurm": JobFormat(
        "an sbatch script, or its submission",
        lambda job, _: slurm(job),
        (*_ON_NODES, "--time", "--partition", "--account", "--submit", *_STOPPING, "--setup"),
        _to_slurm,
    ),
    "ray": JobFormat(
        "a job of a Ray cluster, or its run there",
        lambda job, _: ray_job(job),
        (*_ON_NODES, "--submit", "--address", "--wait", *_STOPPING),
        _to_ray,
    ),
    "skypilot": JobFormat(
        "a task for clouds",
        lambda job, _: skypilot(job),
        (*_ON_NODES, "--accelerator", "--setup", "--wheel", "--bucket", "--image"),
    ),
    "kubernetes": JobFormat(
        "a JobSet or a PyTorchJob",
        lambda job, args: _KUBERNETES[args.kind](job),
        (*_ON_NODES, *_STOPPING, "--volume", "--kind", "--image"),
    ),
}

EXAMPLE = """\
examples:
  meshwright launch torchrun run.toml cluster.nodes=2 --hosts node0 node1
  meshwright launch slurm run.toml cluster.preset=h100-sxm --nodes 4 --time 12h --out job.sbatch
  meshwright launch slurm --plan plan.json --submit
  meshwright launch ray run.toml --nodes 2 --submit
  meshwright launch skypilot run.toml --nodes 2 --accelerator H100 --wheel dist/meshwright.whl
  meshwright launch kubernetes run.toml --nodes 2 --image my/image --volume training
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each format of jobs, with its options."""
    parser.description = "Write a job that trains a config, or hand it to the scheduler."
    parser.epilog = EXAMPLE
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    for name, target in FORMATS.items():
        command = targets.add_parser(name, help=target.help)
        _add_common(command)
        for option in target.options:
            command.add_argument(option, **_OPTIONS[option])


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--plan", type=Path, metavar="plan.json", help="run a saved plan")
    parser.add_argument("--name", default="meshwright", help="of the job")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the job there")


def run(args: argparse.Namespace) -> int:
    """Write, print or submit the job; the config is checked as `train` would."""
    file, overrides = read_words(args)
    if args.plan is not None:
        config = load_planned(args.plan, file, overrides)
    else:
        config = load_config(file, overrides)
    target = FORMATS[args.target]
    job = job_of(config, args)
    text = target.write(job, args)
    _check_data(config)
    for note in unnamed_inputs(config):
        say_line(f"note: {note}", sys.stderr)
    if args.out is not None:
        write_atomic(args.out, text.encode(), private=job.secret in text)
        print(f"wrote {args.out}")
    if target.submit is not None and args.submit:
        return target.submit(text, job, args)
    if args.out is None:
        print(text, end="")
    return EXIT_DONE


def _check_data(config: Config) -> None:
    """Raise `ConfigError` if `data.source` is not set, which means the built-in corpus."""
    if is_default_corpus(config):
        rule = "nobody has named data.source, and a job trains on the built-in corpus only if asked"
        legal = ["data.source=FOLDER", "data.source=hf:NAME", "data.source=stdlib"]
        raise ConfigError(refusal(rule, legal=legal))


def job_of(config: Config, args: argparse.Namespace) -> JobSpec:
    """Return the job that trains a config, with the options of the command line."""
    nodes = _option(args, "nodes") or config.cluster.nodes
    section = config.cluster.model_copy(update={"nodes": nodes})
    config = config.model_copy(update={"cluster": section})
    cluster = cost_inputs_of(config).cluster
    device: Literal["cpu", "cuda"] = "cpu" if cluster.device.kind == "cpu" else "cuda"
    # What `train` would refuse there is refused here.
    machine = Machine(device, cluster.per_node, 1, cluster.device.name, is_fixed=True)
    layout = resolve_layout(config, machine)
    if (unused := left_over(config, layout, cluster.devices)) is not None:
        problem = f"the layout has {layout.world} ranks, and {nodes} node(s) have {cluster.devices}"
        fewer = "fewer devices by cluster.devices_per_node or --nodes"
        raise ConfigError(refusal(f"{problem}: {unused.reason}", legal=[*unused.legal, fewer]))
    arguments = [str(argument) for argument in args.words]
    if args.plan is not None:
        arguments += ["--plan", str(args.plan)]
    if _option(args, "nodes"):
        arguments.append(f"cluster.nodes={nodes}")
    given = {
        "accelerator": _option(args, "accelerator") or _CLOUDS.get(config.cluster.preset),
        "cores": _option(args, "cpus"),
        "time_limit_s": _seconds(args, "time"),
        "grace_s": _seconds(args, "grace"),
        "hosts": tuple(_option(args, "hosts") or ()),
        **{key: _option(args, key) for key in _PLAIN},
    }
    carried = [args.plan, read_words(args)[0]]
    return JobSpec(
        name=args.name,
        arguments=tuple(arguments),
        files={str(path): read_text(path) for path in carried if path is not None},
        nodes=nodes,
        per_node=cluster.per_node,
        device=device,
        log_dir=config.log.dir,
        steps_dir=config.checkpoint.dir,
        **{key: value for key, value in given.items() if value is not None},
    )


_PLAIN: Final = ("restarts", "partition", "account", "image", "setup", "volume", "wheel")


def _option(args: argparse.Namespace, name: str) -> Any:
    """Return an option by name; None if the job's format does not have it."""
    return getattr(args, name, None)


def _seconds(args: argparse.Namespace, name: str) -> int | None:
    text = _option(args, name)
    return None if text is None else parse_time(text)
