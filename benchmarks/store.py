"""Saving to an object store beside saving to a folder, and beside the library's own uploads.

    python -m benchmarks.store --out docs/benchmarks/store.json

Needs s3fs and moto, whose server is started here: it runs on the same cores, in memory, so the
figures say what Meshwright adds to the library, not what a network or a cluster's store brings. Two
ranks under ZeRO-3 with AdamW, as in `benchmarks.checkpoint`. Plain uploads are of the same bytes in
one object for each rank, at once, by s3fs's open file, its one call (`pipe_file`), and by obstore
where it is installed. Medians; the last line is the command to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.checkpoint import PIECE, RANKS, Bench, timed
from meshwright.comm.world import World
from meshwright.spec.resolve import model_spec
from meshwright.store import PART, StorePath

BUCKET: Final = "bucket"
MODELS: Final = {
    "4 MB": model_spec(dim=128, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=384, vocab_size=512),
    "27 MB": model_spec(dim=256, n_layers=8, n_heads=8, n_kv_heads=8, ffn_dim=704, vocab_size=512),
}


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run moto's S3 server with an empty bucket; yields the environment of its clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                try:
                    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
                    urllib.request.urlopen(request).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield {
                "AWS_ACCESS_KEY_ID": "benchmark",
                "AWS_SECRET_ACCESS_KEY": "benchmark",
                "AWS_ENDPOINT_URL": url,
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            server.kill()


def plain(world: World, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the libraries' own uploads and downloads, of each kind."""
    import fsspec

    system, key = fsspec.filesystem("s3"), f"{BUCKET}/plain/{world.rank}"
    piece = os.urandom(PIECE)
    data = (piece * (size // PIECE + 1))[:size]

    def stream() -> None:
        with system.open(key, "wb", block_size=PART) as file:
            for start in range(0, size, PIECE):
                file.write(data[start : start + PIECE])

    kinds: dict[str, Callable[[], object]] = {
        "s3fs_open_s": stream,
        "s3fs_pipe_s": lambda: system.pipe_file(key, data),
        "s3fs_read_s": lambda: system.cat_file(key),
    }
    if find_spec("obstore"):
        import obstore
        from obstore.store import S3Store

        options = {"allow_http": True}
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        store = S3Store(BUCKET, endpoint=endpoint, region="us-east-1", client_options=options)
        kinds["obstore_put_s"] = lambda: obstore.put(store, f"plain/{world.rank}", data)
        kinds["obstore_read_s"] = lambda: obstore.get(store, f"plain/{world.rank}").bytes()
    return {name: [timed(world, work) for _ in range(rounds)] for name, work in kinds.items()}


class StoreBench(Bench):
    """One model on one rank, whose saves go to a folder or to a store."""

    def measured(self) -> dict[str, Any]:
        self.step()
        saver = self.saver("at-once", beside=False)
        saves = [timed(self.world, lambda: self.save(saver)) for _ in range(self.rounds)]
        size = self.saved[-1].bytes
        loads = [timed(self.world, self.load) for _ in range(self.rounds)]
        step = statistics.median(timed(self.world, self.step) for _ in range(self.rounds))
        stalls, beside = self.beside(statistics.median(saves), step)
        return {
            "bytes": size,
            "save_s": saves,
            "load_s": loads,
            "step_s": step,
            "stall_s": stalls,
            "beside_s": beside,
        }


def _rank(rank: int, folder: str, environ: dict[str, str], names: list[str], rounds: int) -> None:
    os.environ.update(environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world = World(rank, RANKS, torch.device("cpu"), store)
    measured = {}
    for name in names:
        local = Path(folder, name)
        local.mkdir(exist_ok=True)
        root = StorePath("s3", f"{BUCKET}/{name.replace(' ', '')}")
        in_folder = StoreBench(MODELS[name], world, local, rounds).measured()
        in_store = StoreBench(MODELS[name], world, root, rounds).measured()
        libraries = plain(world, in_store["bytes"] // RANKS, rounds)
        measured[name] = {"folder": in_folder, "store": in_store, "plain": libraries}
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def as_table(measured: dict[str, dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    lines = ["| weights | | folder | store | ratio |", "|---|---|--:|--:|--:|"]
    for name, figures in measured.items():
        folder, store = figures["folder"], figures["store"]
        for label, key in (
            ("save, training waits", "save_s"),
            ("stall of a save beside the training", "stall_s"),
            ("load, verified", "load_s"),
        ):
            first, second = statistics.median(folder[key]), statistics.median(store[key])
            row = f"{first * 1e3:.1f} ms | {second * 1e3:.1f} ms | {second / first:.2f}"
            lines.append(f"| {name} | {label} | {row} |")
        share = statistics.median(store["stall_s"]) / statistics.median(folder["save_s"])
        lines.append(f"| {name} | stall with the store / save to the folder | | | {share:.1%} |")
        size = store["bytes"] / 1e6
        for key, seconds in figures["plain"].items():
            own = "load_s" if "read" in key else "save_s"
            library, ours = (
                size / statistics.median(seconds),
                size / statistics.median(store[own]),
            )
            label = f"MB/s: {key.removesuffix('_s')}, then ours"
            lines.append(
                f"| {name} | {label} | {library:.0f} | {ours:.0f} | {ours / library:.2f} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, s3_server() as environ:
        mp.spawn(_rank, (folder, environ, args.models, args.rounds), nprocs=RANKS)
        measured = json.loads(Path(folder, "measured.json").read_text())
    print(as_table(measured))
    packages = [name for name in ("fsspec", "s3fs", "moto", "obstore") if find_spec(name)]
    models = " ".join(f"'{name}'" for name in args.models)
    command = f"python -m benchmarks.store --models {models} --rounds {args.rounds}"
    result = {
        "command": command,
        "versions": {name: version(name) for name in ("torch", *packages)},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "models": measured,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(command)


if __name__ == "__main__":
    main()
