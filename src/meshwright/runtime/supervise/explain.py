"""Explains from the ranks' flight recorders which rank waits for which, in which collective.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshwright.comm.flight_recorder_file import Reading, Record, read_flight_recorder
from meshwright.comm.interfaces import machine_id
from meshwright.errors import MeshwrightError
from meshwright.files import read_text
from meshwright.parsing import parse_json
from meshwright.program.events import Events
from meshwright.runtime.machines.machine import memory_of_machine
from meshwright.training.run_folder import RunFolder, read_job
from meshwright.units import format_bytes, format_seconds, parse_bytes

# The letters of /proc/PID/status.
_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait, as for a disk",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "gone",
    "X": "gone",
}


# What torch, numpy and C++ say when the system refuses memory.
REFUSED: Final = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "Cannot allocate memory",
)
# What gloo, NCCL and the store say when a peer is gone: a consequence, not a cause.
_SECOND_HAND: Final = ("DistNetworkError", "DistBackendError", "DistStoreError")
_SECOND_HAND_WORDS: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)
_NAMES_RANKS: Final = re.compile(r"(?:out of memory: )?ranks? \d")
TIMED_OUT: Final = re.compile(r"timed? ?out", re.IGNORECASE)


# What a rank leaves of its failure: see `worker.record_failure`.
_FAILURE: Final[Mapping[str, type | tuple[type, ...]]] = {
    "time": (int, float),
    "type": str,
    "message": str,
    "expected": bool,
    "exit_code": int,
    "out_of_memory": bool,
    "place": str,
    "traceback": str,
}


def read_failure(folder: RunFolder, rank: int) -> dict[str, Any] | None:
    """Return a rank's record of its exception; None if there is none or it is damaged."""
    try:
        failure = parse_json(read_text(folder.failure(rank)))
    except (OSError, ValueError):
        return None
    if not isinstance(failure, dict):
        return None
    is_whole = all(isinstance(failure.get(key), kind) for key, kind in _FAILURE.items())
    return failure if is_whole else None


def raised(rank: int, failure: Mapping[str, Any]) -> str:
    """Return a sentence on the exception that a rank raised.

    If the message already names the rank at fault, as in errors that all ranks raise together, it
    is returned as it is.
    """
    message = str(failure["message"])
    if _NAMES_RANKS.match(message):
        return message
    return f"rank {rank} raised {'' if failure['expected'] else failure['type'] + ': '}{message}"


def out_of_memory(folder: RunFolder, rank: int, limit: int | None, message: str) -> str:
    """Return a message for a rank that ran out of memory; `message` is the allocator's own.

    `limit` is `cluster.memory` in bytes, or None if the config does not set it.
    """
    size = re.search(r"allocate (\d+(?:\.\d+)?)\.? ?([KMGT]iB)?", message)
    asked_bytes = "" if size is None else format_bytes(parse_bytes(size[1] + (size[2] or "")))
    asked = f"asked for {asked_bytes}," if asked_bytes else "asked for"
    of_limit = "" if limit is None else f" of cluster.memory = {format_bytes(limit)}"
    return (
        f"out of memory: rank {rank} {asked} more than was left{of_limit}. What would fit: "
        f"meshwright plan --after-oom {shlex.quote(str(folder.path))}"
    )


def lost_a_peer(failure: Mapping[str, Any]) -> bool:
    """Return whether a rank failed only because another rank had ended before."""
    return failure["type"] in _SECOND_HAND or any(
        phrase in failure["message"] for phrase in _SECOND_HAND_WORDS
    )


@dataclass(frozen=True)
class Witness:
    """A rank seen from outside: its flight recorder, if any, and the state of its process."""

    rank: int
    reading: Reading | None
    process: str

    @property
    def waits_in(self) -> Record | None:
        """The collective or transfer that the rank waits for, or None."""
        records = () if self.reading is None else self.reading.records
        return next((record for record in records if record.is_waited_for), None)

    @property
    def place(self) -> str:
        """The step and phase that the rank is in, in words."""
        return "before its first entry" if self.reading is None else self.reading.place()


ELSEWHERE: Final = "on another machine"


def process_state(pid: int) -> str:
    """Return the state of a process in words, from /proc; "" if that is not available."""
    status = Path(f"/proc/{pid}/status")
    try:
        match = re.search(r"^State:\s+(\w)", status.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return "gone" if Path("/proc/self").exists() else ""
    return "" if match is None else _STATES.get(match[1], match[1])


def witnesses(folder: RunFolder, world: int, pids: Sequence[int] = ()) -> list[Witness]:
    """Return what can be seen of each rank from outside.

    `pids` are the ranks' processes; if empty, the pids in the flight recorders are used.
    """
    seen, own_machine = [], machine_id()
    for rank in range(world):
        reading = read_flight_recorder(folder.flight_recorder(rank))
        if reading is not None and reading.machine != own_machine:
            seen.append(Witness(rank, reading, ELSEWHERE))
            continue
        pid = pids[rank] if pids else reading.pid if reading else 0
        seen.append(Witness(rank, reading, process_state(pid) if pid else "gone"))
    return seen


def explain(seen: Sequence[Witness], clock_s: float | None = None) -> str:
    """Return in words why ranks do not continue: which are missing, and who waits for them.

    `clock_s` is the current time of the monotonic clock; None reads it.
    """
    clock_s = time.monotonic() if clock_s is None else clock_s
    sentences = [*_mismatches(seen), *_missing(seen, clock_s), *_waiting(seen)]
    return "; ".join(sentences) if sentences else "no rank waits for another"


def _missing(seen: Sequence[Witness], clock_s: float) -> Iterator[str]:
    """Yield a phrase on each rank that is stopped, gone, on another machine or silent."""
    for witness in seen:
        inside = "" if witness.waits_in is None else f", inside {witness.waits_in}"
        if witness.process.startswith("stopped"):
            sign = " (SIGSTOP)" if witness.process == "stopped" else " by a debugger"
            yield f"rank {witness.rank} is stopped{sign} in {witness.place}{inside}"
        elif witness.process == "gone" and witness.reading and witness.reading.phase == "end":
            yield f"rank {witness.rank} exited at the end of the run"
        elif witness.process == "gone":
            yield f"rank {witness.rank} is gone, last seen in {witness.place}{inside}"
        elif witness.reading is None:
            yield f"rank {witness.rank} has not begun"
        elif witness.process == ELSEWHERE:  # its clock is another
            yield f"rank {witness.rank}, {ELSEWHERE}, was last in {witness.place}{inside}"
        elif witness.waits_in is None:
            silent = format_seconds(max(0.0, clock_s - witness.reading.at))
            place = f"{witness.place} ({witness.process})"
            yield f"rank {witness.rank} is silent for {silent} in {place}"


def missing_ranks(seen: Sequence[Witness]) -> tuple[int, ...]:
    """Return the ranks that others wait for: those that are stopped or gone, else those that wait
    for nobody."""
    ended = tuple(w.rank for w in seen if w.process.startswith(("stopped", "gone")))
    return ended or tuple(w.rank for w in seen if w.waits_in is None)


def _waiting(seen: Sequence[Witness]) -> Iterator[str]:
    """Yield a phrase on the ranks that wait in the same collective, and which they wait for."""
    groups: dict[tuple[str, str], list[int]] = {}
    for witness in seen:
        if witness.waits_in is not None and not witness.process.startswith(("stopped", "gone")):
            missing = _not_there(witness.waits_in, witness.rank, seen)
            whom = f", which {ranks_text(missing)} {_has(missing)} not begun" if missing else ""
            groups.setdefault((str(witness.waits_in), whom), []).append(witness.rank)
    for (text, whom), ranks in groups.items():
        yield f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {text}{whom}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def memory_words(folder: RunFolder, rank: int) -> str:
    """Return a note in brackets on the peak memory of a CPU rank that the system killed.

    It has the rank's resident bytes and those of all ranks on its machine at the last recorded
    step. Empty if unknown, and for ranks on GPUs.
    """
    with contextlib.suppress(MeshwrightError, OSError, LookupError, TypeError, ValueError):
        job = read_job(folder.path)
        steps = [event for event in Events.read(folder.events) if "peak_memory_bytes" in event]
        total = memory_of_machine()[0]
        if job.machine.device != "cpu" or not steps or not total:
            return ""
        peaks = steps[-1]["peak_memory_bytes"]
        per_node = job.layout.world // job.config.cluster.nodes
        neighbours = range(rank // per_node * per_node, (rank // per_node + 1) * per_node)
        node_bytes = format_bytes(sum(peaks[str(neighbour)] for neighbour in neighbours))
        return (
            f" (its process held {format_bytes(peaks[str(rank)])} and the ranks of this machine "
            f"{node_bytes} of {format_bytes(total)} at step {steps[-1]['step']})"
        )
    return ""


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 1` or `ranks 0, 2`."""
    listed = list(ranks)
    return f"rank{'' if len(listed) == 1 else 's'} {', '.join(map(str, listed))}"


def _not_there(record: Record, rank: int, seen: Sequence[Witness]) -> list[int]:
    """Return the ranks of a record's process group that have not begun this collective."""
    missing = []
    for witness in seen:
        if witness.rank == rank or witness.reading is None:
            continue
        if record.is_transfer:
            if witness.rank != record.peer:
                continue
            kind = "recv" if record.kind == "send" else "send"
            begun = max(
                (
                    r.sequence
                    for r in witness.reading.records
                    if r.kind == kind and r.peer == rank and r.group.name == record.group.name
                ),
                default=0,
            )
        elif witness.rank in record.group.ranks:
            begun = witness.reading.begun(record.group)
        else:
            continue
        if begun < record.sequence:
            missing.append(witness.rank)
    return missing


def _mismatches(seen: Sequence[Witness]) -> Iterator[str]:
    """Yield a sentence on the first collective in which ranks of a group differ in kind or size."""
    by_collective: dict[tuple[str, tuple[int, ...], int], dict[int, Record]] = {}
    for witness in seen:
        for record in () if witness.reading is None else witness.reading.records:
            if not record.is_transfer and witness.rank in record.group.ranks:
                key = (record.group.name, record.group.ranks, record.sequence)
                by_collective.setdefault(key, {})[witness.rank] = record
    wrong = [
        records
        for records in by_collective.values()
        if len({(record.kind, _same_for_all(record)) for record in records.values()}) > 1
    ]
    if not wrong:
        return
    first = min(wrong, key=lambda records: min(record.begun for record in records.values()))
    sides: dict[str, list[int]] = {}
    for rank, record in first.items():
        sides.setdefault(f"{record} in step {record.step}, {record.phase}", []).append(rank)
    texts = [
        f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {text}"
        for text, ranks in sides.items()
    ]
    yield "ranks disagree: " + ", but ".join(texts)


def _same_for_all(record: Record) -> int:
    """Return the bytes of a collective if all ranks must have the same number, else 0.

    In an all-to-all each rank may send a different number, such as tokens to experts.
    """
    return 0 if record.kind == "all_to_all" else record.bytes


def mismatch(seen: Sequence[Witness]) -> str:
    """Return a sentence on the first collective in which ranks of a group differ, or ""."""
    return next(_mismatches(seen), "")
