"""Compares the speed of Meshwright with that of its peers, mode by mode, on two CPU ranks.

All train the same Llama on the same number of random tokens per step, with gradient clipping and
AdamW. Adapters print their step times, see `runtime.peers.common`; Meshwright's are `step_time_s`
of its events. The first two steps of a run do not count. Runs of all systems alternate, so that the
machine's noise affects all alike. A peer gets the microbatch that is fastest in a short sweep,
Meshwright its default. PyTorch's own wrappers are always included.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import meshwright
from meshwright.data.megatron_pair import write_megatron
from meshwright.data.view import Shard
from meshwright.errors import ConfigError, refusal
from meshwright.runtime.peers.catalogue import (
    DATA,
    PEERS,
    RANKS,
    SINGLE,
    PeerSizes,
    adapter,
    ranks_of,
)
from meshwright.spec.loading import Config

OURS = "meshwright"
NOT_COUNTED = 2
SWEEP = (1, 2, 4)
SWEEP_STEPS = 4
LIMIT_S = 600
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    SINGLE: {"dp_replicate": 1},
    "ddp": {"dp_replicate": RANKS},
    "zero1": {"dp_shard": RANKS, "zero": 1},
    "zero2": {"dp_shard": RANKS, "zero": 2},
    "zero3": {"dp_shard": RANKS, "zero": 3},
    "tp": {"tp": RANKS},
    "pp": {"pp": RANKS, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    "ring": {"cp": RANKS, "cp_kind": "ring"},
    "ulysses": {"cp": RANKS, "cp_kind": "ulysses"},
    "bf16": {"dp_replicate": RANKS},
}
VERSIONS = """
import importlib.metadata, importlib.util, json, sys
def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
peers = json.loads(sys.argv[1])
print(json.dumps({
    name: importlib.metadata.version(package)
    for name, (needs, package, _) in peers.items() if all(map(has, needs))
}))
"""


class PeerFailure(Exception):
    """Raised when a run ends without printing step times."""


@dataclass
class Entrant:
    """One framework in one mode, with its microbatch in rows, the results of the sweep, and times.

    `seconds` are the times of its counted steps, `peaks` the peak resident bytes of each run's
    largest rank.
    """

    system: str
    mode: str
    microbatch: int | None = None
    sweep: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class Bench:
    """What all runs share: the model, the interpreter of each peer, and Meshwright's data."""

    sizes: PeerSizes
    pythons: Mapping[str, str]
    tokens: Path
    environ: Mapping[str, str]

    def run(self, entrant: Entrant, steps: int) -> None:
        """Train once and add the times of the counted steps; a failure excludes the entrant."""
        try:
            if entrant.system == OURS:
                seconds, peak, entrant.microbatch = self.ours(entrant.mode, steps)
            else:
                assert entrant.microbatch is not None
                seconds, peak = self.peer(entrant.system, entrant.mode, entrant.microbatch, steps)
            entrant.seconds += seconds[NOT_COUNTED:]
            entrant.peaks.append(peak)
        except PeerFailure as failure:
            entrant.failure = str(failure)

    def sweep(self, entrant: Entrant) -> None:
        """Set a peer's microbatch to the one with the fastest counted step."""
        shares = ranks_of(entrant.mode) if entrant.mode in DATA else 1
        sequences = self.sizes.batch // shares
        failures = []
        for microbatch in (size for size in SWEEP if sequences % size == 0):
            try:
                seconds, _ = self.peer(entrant.system, entrant.mode, microbatch, SWEEP_STEPS)
            except PeerFailure as failure:
                failures.append(str(failure))
                continue
            entrant.sweep[str(microbatch)] = round(min(seconds[NOT_COUNTED:]), 4)
        if not entrant.sweep:
            entrant.failure = failures[0]
            return
        entrant.microbatch = int(min(entrant.sweep, key=lambda size: entrant.sweep[size]))

    def peer(self, system: str, mode: str, microbatch: int, steps: int) -> tuple[list[float], int]:
        """Return the step times of one run of a peer and its peak resident bytes."""
        arguments = ["--mode", mode, "--steps", str(steps), "--microbatch", str(microbatch)]
        for name, value in vars(self.sizes).items():
            arguments += [f"--{name}", str(value)]
        out = _output([self.pythons[system], "-m", adapter(system), *arguments], self.environ)
        lines = [line for line in out.splitlines() if line.startswith('{"seconds"')]
        if not lines:
            raise PeerFailure("it printed no step times")
        result = json.loads(lines[-1])
        return result["seconds"], result["peak_bytes"]

    def ours(self, mode: str, steps: int) -> tuple[list[float], int, int]:
        """Return the step times, peak bytes and chosen microbatch of `meshwright train`."""
        sizes = self.sizes
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "model.vocab_size": sizes.vocab,
                "model.dim": sizes.dim,
                "model.n_layers": sizes.layers,
                "model.n_heads": sizes.heads,
                "model.n_kv_heads": sizes.heads,
                "model.ffn_dim": sizes.ffn,
                "data.source": self.tokens,
                "data.tokenizer": self.tokens.with_name("tokenizer.json"),
                "train.batch": sizes.batch,
                "train.seq_len": sizes.seq,
                "train.steps": steps,
                "train.precision": "bf16" if mode == "bf16" else "fp32",
                "optimizer.lr": 3e-4,
                "cluster.device": "cpu",
                "log.dir": folder,
                "log.name": "run",
                "checkpoint.dir": str(Path(folder) / "weights"),
                **{f"layout.{key}": value for key, value in LAYOUTS[mode].items()},
            }
            overrides = [f"{key}={value}" for key, value in settings.items()]
            _output([sys.executable, "-m", "meshwright", "train", *overrides], self.environ)
            lines = (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        start = next(event for event in events if event["event"] == "start")
        done = [event for event in events if event["event"] == "step"]
        peak = max(done[-1]["peak_memory_bytes"].values())
        return [event["step_time_s"] for event in done], peak, start["layout"]["microbatch"]


def _output(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what a command prints, run by this interpreter or by that of a peer.

    A peer's interpreter gets only this package on its PYTHONPATH, through a link. Raises
    `PeerFailure` if the command fails.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-peer-") as folder:
        is_ours = command[0] == sys.executable
        Path(folder, "meshwright").symlink_to(Path(meshwright.__file__).parent)
        paths = os.pathsep.join(filter(None, sys.path)) if is_ours else folder
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env={**environ, "PYTHONPATH": paths},
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PeerFailure(f"it ran past {LIMIT_S} s") from None
    if done.returncode:
        error_lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in error_lines if "Error: " in line] or error_lines[-1:]
        raise PeerFailure(f"exit code {done.returncode}: {errors[0][:300] if errors else ''}")
    return done.stdout


def random_tokens(folder: Path, sizes: PeerSizes, steps: int) -> Path:
    """Write random tokens as a Megatron pair, enough for a run, and return its path.

    A tokenizer with the model's vocabulary size is written beside it.
    """
    import numpy as np
    from tokenizers import Tokenizer, models

    vocabulary = {"</s>": 0, **{f"t{n}": n for n in range(1, sizes.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.save(str(folder / "tokenizer.json"))

    documents = 64
    tokens_per_document = (steps + 4) * sizes.batch * sizes.seq // documents + 1
    tokens = np.random.default_rng(0).integers(0, sizes.vocab, documents * tokens_per_document)
    prefix = folder / "random"
    ends = np.arange(1, documents + 1, dtype=np.int64) * tokens_per_document
    write_megatron(prefix, [Shard(prefix, tokens, ends)], sizes.vocab)
    return prefix.with_suffix(".bin")


def versions(python: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of the peers that a Python interpreter can import.

    Raises `ConfigError` if it is not a Python interpreter.
    """
    try:
        installed: dict[str, str] = json.loads(
            _output([python, "-c", VERSIONS, json.dumps(PEERS)], environ)
        )
    except (OSError, PeerFailure) as failure:
        raise ConfigError(f"--peers-python {python}: {failure}") from None
    return installed


def table(entrants: Sequence[Entrant], tokens: int) -> list[dict[str, Any]]:
    """Return a row per entrant with times; Meshwright's has its `ratio` to the mode's best peer."""
    medians = {
        (e.mode, e.system): tokens / statistics.median(e.seconds) for e in entrants if e.seconds
    }
    rows = []
    for entrant in entrants:
        if not entrant.seconds:
            continue
        mode, system = entrant.mode, entrant.system
        peer_speeds = [speed for key, speed in medians.items() if key[0] == mode and key[1] != OURS]
        is_compared = system == OURS and peer_speeds
        rows.append(
            {
                "mode": mode,
                "system": system,
                "tokens_per_s": round(medians[mode, system], 1),
                "slowest": round(tokens / max(entrant.seconds), 1),
                "fastest": round(tokens / min(entrant.seconds), 1),
                "steps": len(entrant.seconds),
                "microbatch": entrant.microbatch,
                "peak_bytes": max(entrant.peaks),
                "sweep_seconds": entrant.sweep,
                "ratio": round(medians[mode, system] / max(peer_speeds), 3)
                if is_compared
                else None,
            }
        )
    return rows


def line_up(modes: Sequence[str], systems: Sequence[str], chosen: Path | None) -> list[Entrant]:
    """Return an entrant for each mode of each system; `chosen` is an earlier result.

    Microbatches are those of the earlier result if one is given.
    """
    earlier: dict[tuple[str, str], Mapping[str, Any]] = {}
    if chosen is not None:
        rows = json.loads(chosen.read_text())["rows"]
        earlier = {(row["mode"], row["system"]): row for row in rows}
    entrants = []
    for mode in modes:
        for system in systems:
            if system == OURS or mode in PEERS[system].modes:
                row = earlier.get((mode, system), {})
                entrant = Entrant(system, mode, row.get("microbatch"))
                entrant.sweep = dict(row.get("sweep_seconds", {}))
                entrants.append(entrant)
    return entrants


def sizes_of(config: Config) -> PeerSizes:
    """Return a config's model and batch as `PeerSizes`.

    Raises `ConfigError` for features that the adapters do not build.
    """
    model, train = config.model, config.train
    plain = {
        "model.family": ("llama", model.family),
        "model.n_kv_heads": (model.n_heads, model.n_kv_heads),
        "model.tie_embeddings": (False, model.tie_embeddings),
        "model.init_from": (None, model.init_from),
        "model.dropout": (0.0, model.dropout),
    }
    for key, (legal, value) in plain.items():
        if value != legal:
            problem = f"bench peers trains a plain Llama in every peer: {key} = {value}"
            raise ConfigError(refusal(problem, legal=[legal]))
    if train.batch % (2 * RANKS):
        raise ConfigError(
            refusal(
                f"train.batch = {train.batch} must be a multiple of {2 * RANKS}: two ranks, and "
                "pipelines of two microbatches",
                legal=[f"train.batch = {2 * RANKS * max(1, train.batch // (2 * RANKS))}"],
            )
        )
    return PeerSizes(
        model.vocab_size,
        model.dim,
        model.n_layers,
        model.n_heads,
        model.ffn_dim,
        train.seq_len,
        train.batch,
    )


def measure(
    bench: Bench,
    entrants: Sequence[Entrant],
    rounds: int,
    steps: int,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Sweep microbatches, then run all entrants in turns; yields the results after each round."""
    for entrant in entrants:
        if entrant.system != OURS and entrant.microbatch is None:
            bench.sweep(entrant)
            progress(f"sweep {entrant.mode} {entrant.system}: {entrant.sweep or entrant.failure}")
    for turn in range(1, rounds + 1):
        for entrant in entrants:
            if entrant.failure is None:
                bench.run(entrant, steps)
                progress(f"round {turn} {entrant.mode} {entrant.system} {entrant.failure or ''}")
        yield {
            "rounds": turn,
            "rows": table(entrants, bench.sizes.batch * bench.sizes.seq),
            "failures": [
                {"mode": entrant.mode, "system": entrant.system, "why": entrant.failure}
                for entrant in entrants
                if entrant.failure
            ],
        }
