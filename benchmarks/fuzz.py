"""Every file that is read from outside, damaged at random: it is read, or refused in words.

    python -m benchmarks.fuzz --minutes 10 [--seed 0] [--only NAME ...]

A valid example of each file is changed (bytes flipped, cut off, doubled; numbers, texts and lists
swapped for others, huge, nested or of another kind), and given to the function that reads it. That
function returns or raises `MeshwrightError`; whatever else it raises is a failure, and so are more
CPU seconds than `SECONDS` and more new memory than `GROWTH`. Prints a row for each reader.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from meshwright.errors import MeshwrightError
from meshwright.units import GIB, MIB, format_bytes

SECONDS: Final = 10.0  # of the processor: a busy machine changes nothing
GROWTH: Final = 512 * MIB
_LIMIT: Final = 2 * GIB  # above it the system refuses memory
# What stands for a value in JSON, TOML, YAML and command lines alike.
_LITERAL: Final = re.compile(
    rb'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|\[[^\[\]]*\]|\{\}'
)
_ODD: Final = (
    *(b"0", b"-1", b"1", b"2", b"3", b"1000000000", b"2147483648", b"9223372036854775808"),
    *(b"9" * 5000, b"-" + b"9" * 400, b"1e999", b"1e-320", b"-0.5", b"0.1", b"NaN", b"nan", b"inf"),
    *(b"true", b"false", b"null", b"[]", b"{}", b'""', b'"a"', b'"' + b"a" * 70000 + b'"'),
    *(b'"../../etc/passwd"', b'"/dev/zero"', b'"a\\u0000b"', b'"\\ud800"', b'"\\u001b[2J"'),
    *(b'"\xff\xfe"', b'"(a|a)*(a|a)*b"', b"[1, [2, [3, {}]]]", b'{"a": {"b": [1]}}', b"1999-01-01"),
    *(b"[" * 200 + b"]" * 200, b"[" * 20000, b'{"a":' * 90 + b"1" + b"}" * 90, b"[0]", b'["a", 1]'),
    *(b"[" + b"0," * 3000 + b"0]", b"[-1, -5]", b"[1e300, 1e300]"),
)


@dataclass(frozen=True)
class Reader:
    """A function that reads files of a folder: `files` are a valid example, `aims` what is changed.

    `seal` puts sizes and digests right again, so that a change gets past them.
    """

    name: str
    files: Mapping[str, bytes]
    aims: tuple[str, ...]
    read: Callable[[Path], object]
    seal: Callable[[Path], None] | None = None


@dataclass
class Found:
    """What came of a reader: examples tried, how many were read, failures by their last line."""

    tried: int = 0
    taken: int = 0
    growth: int = 0
    slowest: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)


def changed(content: bytes, draw: random.Random) -> bytes:
    """Return a file's content with one to four changes."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        content = _change(content, draw)
    return content


def _change(content: bytes, draw: random.Random) -> bytes:
    size = len(content)
    if draw.random() < 0.7:
        places = [match.span() for match in _LITERAL.finditer(content[:200_000])]
        if places:
            start, end = draw.choice(places)
            other = draw.choice(places)
            new = content[slice(*other)] if draw.random() < 0.2 else draw.choice(_ODD)
            return content[:start] + new + content[end:]
    at = draw.randrange(size + 1)
    kind = draw.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + draw.randbytes(draw.choice((1, 8, 64))) + content[at:]
    if kind == 2:  # a piece twice, or left out
        end = min(size, at + draw.choice((1, 16, 256)))
        return content[:at] + content[at:end] * draw.choice((0, 2, 50)) + content[end:]
    if kind == 3:
        return draw.choice((b"", b"\0", b"\n", b"\xff" * 64, b"{}", b"[]", b"[" * 100_000, b"1"))
    flipped = bytearray(content)
    for _ in range(draw.choice((1, 3, 20))):
        if flipped:
            flipped[draw.randrange(len(flipped))] = draw.choice((0, 1, 127, 255, *b"9-[]{}\"',:"))
    return bytes(flipped)


def damage(reader: Reader, folder: Path, draw: random.Random) -> dict[str, bytes]:
    """Write a reader's example into a new folder, one of its files changed; returns what was."""
    for name, content in reader.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    aim = draw.choice(reader.aims)
    new = changed(reader.files[aim], draw)
    (folder / aim).write_bytes(new)
    if reader.seal is not None and draw.random() < 0.7:
        with contextlib.suppress(Exception):  # it is too broken to be put right
            reader.seal(folder)
    return {aim: new}


def attempt(reader: Reader, folder: Path, found: Found) -> str | None:
    """Have a folder read; returns what went wrong, if anything did."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is held now
    before, started = _status("VmRSS"), time.process_time()
    failure = None
    found.tried += 1
    try:
        with _bounded():
            reader.read(folder)
        found.taken += 1
    except MeshwrightError as error:
        if len(str(error)) > 20_000:
            failure = f"long message: {len(str(error))} characters, {error!s:.80}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Rust's panics are no Exception
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "meshwright" in frame.filename]
        last = (ours or frames)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        failure = f"{type(error).__name__} at {where}: {error!s:.160}"
    grown, took = _status("VmHWM") - before, time.process_time() - started
    found.growth, found.slowest = max(found.growth, grown), max(found.slowest, took)
    if failure is None and grown > GROWTH:
        failure = f"it took {format_bytes(grown)} of new memory"
    return failure


def _status(field: str) -> int:
    """Return a size of this process in bytes, by its name in `/proc/self/status`."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(rf"{field}:\s+(\d+) kB", text)[0]) * 1024


class TooSlowError(Exception):
    """A reader took more than `SECONDS` of the processor."""


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Bound the memory and the time of what is done inside."""

    def late(*_: object) -> None:
        raise TooSlowError(f"more than {SECONDS:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + _LIMIT, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def run(
    readers: Sequence[Reader], minutes: float, seed: int, keep: Path | None
) -> dict[str, Found]:
    """Try the readers in turns for some minutes; files that make one fail go to `keep`."""
    found = {reader.name: Found() for reader in readers}
    until, number = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < until:
        for reader in readers:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / "it"
                draw = random.Random(f"{seed} {number} {reader.name}")
                damage(reader, folder, draw)
                failure = attempt(reader, folder, found[reader.name])
                known = found[reader.name].failures
                if failure is not None and (kind := failure.partition(": ")[0]) not in known:
                    known[kind] = failure
                    print(f"{reader.name} {number}: {failure}", file=sys.stderr, flush=True)
                    if keep is not None:
                        shutil.copytree(folder, keep / f"{reader.name}-{number}")
        number += 1
    return found


def table(found: Mapping[str, Found]) -> str:
    """Return what was found as a table in Markdown."""
    lines = [
        "| reader | examples | read | failures | peak growth | slowest, CPU s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, one in found.items():
        cells = [one.tried, one.taken, len(one.failures), format_bytes(one.growth)]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} | {one.slowest:.2f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.fuzz_readers import make_readers

    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="readers")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="for files that make one fail")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        readers = [r for r in make_readers(Path(name)) if not args.only or r.name in args.only]
        found = run(readers, args.minutes, args.seed, args.keep)
    print(table(found))
    failures = [(name, text) for name, one in found.items() for text in one.failures.values()]
    for name, text in failures:
        print(f"{name}: {text}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
