"""The tests of what optional packages bring, each group in an environment of its own.

    python -m ci.extras ray            make build/envs/ray where it is missing, and run its tests
    python -m ci.extras ray --pin      take what is there today, and pin it in ci/constraints

An environment has the packages of .venv beneath it and its own above, so that a group may need
another version of one: it takes no second copy of torch. A test that is skipped has failed here,
but for those of shared files where these are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from ci.debian import Package, install

ROOT: Final = Path(__file__).parents[1]
CONSTRAINTS: Final = ROOT / "ci" / "constraints"
ENVS: Final = ROOT / "build" / "envs"


@dataclass(frozen=True)
class Extra:
    """A group: what it installs, and its tests.

    `requirements` are pip's, in the versions of ci/constraints/NAME.txt; `bare` are those that are
    installed without what they ask for; `debian` are packages of the distribution, each with a
    command that it brings.
    """

    tests: tuple[str, ...]
    minutes: float
    requirements: tuple[str, ...] = ()
    debian: tuple[Package, ...] = ()
    bare: tuple[str, ...] = ()


EXTRAS: Final = {
    "deepspeed": Extra(("tests/runtime/test_deepspeed.py",), 3, ("meshwright[deepspeed]",)),
    "ray": Extra(("tests/runtime/test_ray.py",), 3, ("meshwright[ray]",)),
    "torchao": Extra(
        (
            *("tests/kernels/test_float8.py", "tests/models/test_four_bits_peers.py"),
            "tests/project/test_kernels_ahead.py",
        ),
        5,
        ("meshwright[fp8]", "bitsandbytes", "triton"),
    ),
    "other-trainers": Extra(
        ("tests/prove/test_other_trainers.py", "tests/prove/test_shared_probes.py"),
        11,
        ("accelerate", "deepspeed", "torchtitan", "triton", "megatron-core"),
    ),
    "lm-eval": Extra(
        ("tests/evaluate/test_eval_tasks.py",), 3, ("meshwright[lm-eval]", "accelerate")
    ),
    "peft": Extra(
        (
            *("tests/checkpoint/test_lora_peft.py", "tests/checkpoint/test_lora_experts_peft.py"),
            *("tests/training/test_sft_loops.py", "tests/data/test_chat_templates.py"),
        ),
        10,
        ("peft", "accelerate", "trl"),
    ),
    "schemas": Extra(
        ("tests/runtime/test_job_schemas.py",),
        2,
        ("skypilot", "jsonschema", "kubeflow-training", "kubernetes", "kubernetes-validate"),
    ),
    # Whole, these would bring Transformer Engine, other versions of one another and of torch; their
    # parsers and dataclasses do without.
    "trainers": Extra(
        ("tests/interop/test_trainer_parsers.py",),
        5,
        (
            *("meshwright[deepspeed]", "accelerate", "torchtitan", "triton", "megatron-core"),
            *("peft", "trl", "addict", "art", "fire", "colorama"),
        ),
        bare=("axolotl", "megatron-bridge", "ms-swift"),
    ),
    # An S3 server of moto's, against which runs save and are killed.
    "store": Extra(("tests/runtime/test_store_runs.py",), 6, ("meshwright[s3]", "moto[server]")),
    "package": Extra(("tests/project/test_package_install.py",), 5, ("build",)),
    "chromium": Extra(
        (
            *("tests/report/test_report_browser.py", "tests/project/test_site.py"),
            *("tests/serve/test_serve.py", "tests/serve/test_serve_browser.py"),
        ),
        8,
        ("meshwright[ui]", "axe-playwright-python", "pillow"),
        (Package("chromium", "chromium"),),
    ),
    "trackers": Extra(
        ("tests/training/test_trackers.py",),
        2,
        ("wandb", "trackio", "mlflow-skinny"),
    ),
    # The build that the package index has, for CUDA: no GPU is needed.
    "oldest-torch": Extra(
        ("tests/project/test_oldest_torch.py", "tests/project/test_torch_private.py"),
        10,
        ("torch==2.11.0",),
    ),
    "slurm": Extra(
        ("tests/cli/test_slurm.py",),
        7,
        debian=(Package("slurm-wlm", "slurmctld"), Package("munge", "munged")),
    ),
}


def make(name: str, base: Path, is_pinned: bool = True) -> Path:
    """Return the Python of a group's environment, made where it is missing or out of date."""
    extra = EXTRAS[name]
    install(extra.debian)
    folder = ENVS / name
    python, stamp = folder / "bin" / "python", folder / "made-of"
    pins = [file for file in [CONSTRAINTS / f"{name}.txt"] if is_pinned and file.is_file()]
    made_of = _made_of(extra, base, pins)
    if stamp.is_file() and stamp.read_text() == made_of:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
    beneath = _output(base, "import sysconfig; print(sysconfig.get_path('purelib'))")
    above = _output(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    # It sorts after the link to the sources that an editable install leaves.
    (Path(above) / "beneath.pth").write_text(f"import site; site.addsitedir({beneath!r})\n")
    pip = [str(base), "-m", "pip", "--python", str(python), "install", "--quiet"]
    words = [word for file in pins for word in ("--constraint", str(file))]
    # What is beneath stays, unless a package of the group needs another version; torch always does,
    # unless the group names one.
    torch = _output(base, "from importlib.metadata import version; print(version('torch'))")
    wanted = [x for x in extra.requirements if not x.startswith("meshwright")]
    wanted += [] if any(x.startswith("torch==") for x in wanted) else [f"torch=={torch}"]
    ours = [one for one in extra.requirements if one.startswith("meshwright")] or ["meshwright"]
    editable = [f"{ROOT}{one.removeprefix('meshwright')}" for one in ours]
    subprocess.run([*pip, *words, "--editable", *editable, *wanted], check=True)
    if extra.bare:
        subprocess.run([*pip, *words, "--no-deps", *extra.bare], check=True)
    stamp.write_text(made_of)
    return python


def pin(name: str) -> None:
    """Write the versions of what a group's environment has of its own."""
    named = ("meshwright", "torch")  # torch is pinned elsewhere, or by the group
    found = distributions(path=[str(p) for p in (ENVS / name).glob("lib/python*/site-packages")])
    lines = sorted(f"{one.name}=={one.version}\n" for one in found if one.name not in named)
    if lines:
        (CONSTRAINTS / f"{name}.txt").write_text("".join(lines))


def _made_of(extra: Extra, base: Path, pins: Sequence[Path]) -> str:
    """Return what an environment follows from, as a digest."""
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt", *pins)
    texts = (repr(extra), str(base), *(file.read_text() for file in files))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _output(python: Path, code: str) -> str:
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Make a group's environment and run its tests in it; pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m ci.extras", description=__doc__)
    parser.add_argument("name", choices=EXTRAS)
    parser.add_argument("--base", type=Path, default=ROOT / ".venv/bin/python", metavar="PYTHON")
    parser.add_argument("--pin", action="store_true", help="install anew, pin, run no tests")
    args, more = parser.parse_known_args(arguments)
    python = make(args.name, args.base.absolute(), is_pinned=not args.pin)
    if args.pin:
        pin(args.name)
        return 0
    # What DeepSpeed compiles as it starts is compiled once for all tests, not for each. A lock that
    # an earlier run has left would be waited for.
    compiled = ENVS / args.name / "torch-extensions"
    shutil.rmtree(compiled, ignore_errors=True)
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(compiled)}
    words = [
        "-m",
        "pytest",
        "-p",
        "ci.plugin",
        "--no-skips",
        "--may-skip=the shared",
        "-m",
        "not perf",
        *EXTRAS[args.name].tests,
    ]
    return subprocess.run([python, *words, *more], cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
