"""Tiny whole runs, for the tests that start processes."""

import os
import sys

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
    code += "from meshwright.launch import worker\nworker.main()\n"
    return lambda folder: [sys.executable, "-c", code, str(folder.path)]
