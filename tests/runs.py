"""Tiny whole runs, for the tests that start processes."""

import os
import subprocess
import sys
from pathlib import Path

from meshwright.runtime.supervise.supervisor import listen_on_loopback

TINY = [
    "model.dim=32",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "train.batch=4",
    "train.seq_len=32",
    "train.steps=4",
    "cluster.device=cpu",
]


def clean_environ():
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}


def faulty_worker(body: str):
    """A rank process that does something wrong, in place of the ordinary one."""
    code = f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{body}\n"
    code += "from meshwright.runtime.ranks import worker\nworker.main()\n"
    return lambda folder: [sys.executable, "-c", code, str(folder.path)]


def rank_pids(run_folder: Path) -> list[int]:
    """Live processes whose command line names the run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run_folder).encode() in words:
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    """Whether a process has not ended; who adopts those of another that died may reap them late."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def torchrun(*words: str, stderr: int = subprocess.PIPE, **environ: str) -> str:
    """Run a command as two local ranks of torchrun, and return what they print on stdout.

    With `stderr=subprocess.STDOUT` also what they print there. `environ` is added to theirs.
    """
    with listen_on_loopback(None) as listener:
        port = listener.getsockname()[1]
    at = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *at, "-m", "meshwright", *words],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**clean_environ(), "OMP_NUM_THREADS": "1", **environ},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.stderr or done.stdout)[-2000:]
    return done.stdout


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run iproute2."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
