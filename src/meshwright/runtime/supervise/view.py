"""The terminal view of a run, drawn from its events: live in a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any, Final, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.comm.generations import replicas_text
from meshwright.files import is_full
from meshwright.layout import Layout
from meshwright.lines import folded
from meshwright.parsing import parse_json
from meshwright.program.events import dropped_share
from meshwright.report.agreement import name_in_events
from meshwright.units import counted, format_bytes, format_count, format_seconds

# Logged steps that are looked back on, columns of the sparkline, steps that make a trend.
_BACK, _COLUMNS, _LEAST = 200, 40, 5
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "_.-=+*#@"


class Trend:
    """The recent losses as a sparkline: each column is the mean of a few steps."""

    def __init__(self, *, is_ascii: bool = False) -> None:
        self._marks = _ASCII if is_ascii else _BLOCKS
        self._points: deque[tuple[int, float]] = deque(maxlen=_BACK)

    def clear(self) -> None:
        """Remove all losses."""
        self._points.clear()

    def add(self, step: int, loss: float | str) -> None:
        """Add the loss of a step; non-finite losses, which events have as text, are ignored."""
        if not isinstance(loss, str) and math.isfinite(loss):
            self._points.append((step, loss))

    @property
    def text(self) -> str:
        """The sparkline and the least-squares slope in nats per 100 steps; "" for few steps."""
        if len(self._points) < _LEAST:
            return ""
        steps, losses = zip(*self._points, strict=True)
        slope = linear_regression(steps, losses).slope
        return f"{self._line(losses)}  {slope * 100:+.3f} nats per 100 steps"

    def _line(self, losses: tuple[float, ...]) -> str:
        count = min(len(losses), _COLUMNS)
        ends = [len(losses) * column // count for column in range(count + 1)]
        means = [fmean(losses[a:b]) for a, b in pairwise(ends)]
        low, high = min(means), max(means)
        scale = (len(self._marks) - 1) / (high - low) if high > low else 0.0
        return "".join(self._marks[round((mean - low) * scale)] for mean in means)


# Events that are said in a line, by kind, with their fields.
NOTICES: Final = {
    "evaluating": "step {step}: evaluating on {batches} batches",
    "resume": "resuming after step {step}, from {path}, written by {layout}",
    "bad_checkpoint": "set aside: {problem}",
    "overflow": "step {step}: skipped, the gradient of {tensor} is not finite",
    "restart": "{cause}\n{detected}restarting after step {from_step} (attempt {attempt}), "
    "steps to recompute: {lost_steps}",
    "replica_lost": "{cause}\n{detected}{others} without {missing}",
    "regroup": "step {step}: {members} from here on",
    "slow_rank": "rank {rank} is slow: from step {from_step} to {step} all others waited for "
    "{others_wait} of the time, it for {waits}",
    "loss_spike": "step {step}: loss {loss}, where {usual} was usual",
    "stopping": "{text}",
    "measured": "{says}",
    "disk_full": "the disk of {path} is full: the run continues without its log, and writes the "
    "events once there is room",
}
# Kinds of events that a quiet view leaves out.
_CHATTER: Final = ("start", "step", "evaluating", "eval", "save", "experts")
# Steps whose median is the pace: one that waited for a save says little of those to come.
_PACED_BY: Final = 20


def notice(event: Mapping[str, Any]) -> str:
    """Return a line that describes an event of a kind in `NOTICES`."""
    shown = {k: number(v) if isinstance(v, float) else v for k, v in event.items()}
    shown |= {key: f"{event[key]:.0%}" for key in ("others_wait", "waits") if key in event}
    if event["event"] == "replica_lost":
        verb = "continues" if len(event["left"]) == 1 else "continue"
        shown["others"] = f"{replicas_text(event['left'])} {verb}"
        shown["missing"] = replicas_text(event["replicas"])
    elif event["event"] == "regroup":
        verb = "trains" if len(event["replicas"]) == 1 else "train"
        shown["members"] = f"{replicas_text(event['replicas'])} {verb}"
    detect_s = event.get("detect_s")  # nobody watches the ranks of torchrun
    shown["detected"] = "" if detect_s is None else f"detected in {format_seconds(detect_s)}; "
    return NOTICES[event["event"]].format(**shown)


class Lasting:
    """An output stream whose end, for example when the terminal closes, raises no error.

    Writes after that are dropped.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self.is_lost = out, False

    def write(self, text: str) -> int:
        """Write a text and flush."""
        if not self.is_lost:
            try:
                self._out.write(text)
                self._out.flush()
            except (OSError, ValueError):
                self._lose()
        return len(text)

    def flush(self) -> None:
        """Do nothing, since `write` flushes."""

    def _lose(self) -> None:
        """Redirect the stream to the null device, since Python flushes it at exit."""
        self.is_lost = True
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), self._out.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def open_view(out: Lasting, *, quiet: bool = False) -> View:
    """Return a live view if `out` is a terminal, else one that prints lines.

    `quiet` returns one that shows only unusual events and how the run ended.
    """
    console = Console(file=cast(TextIO, out), highlight=False)
    if quiet:
        return QuietView(console)
    return LiveView(console) if console.is_terminal else View(console)


class View:
    """Prints a line for the start of a run and for each event, such as a step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start: Mapping[str, Any] = {}
        self._pace: deque[float] = deque(maxlen=_PACED_BY)
        self._dead = 0

    def write(self, event: Mapping[str, Any]) -> None:
        """Print a line for an event."""
        kind = event["event"]
        if kind == "step":
            self._pace.append(event["step_time_s"])
        if kind == "start":
            self._start = event
            self._pace.clear()
            self._print(start_line(event))
        elif kind == "step":
            self._step(event)
        elif kind == "eval":
            self._print(
                f"step {event['step']}: held-out loss {number(event['loss'])} "
                f"({format_seconds(event['seconds'])})"
            )
        elif kind == "save":
            self._print(
                f"step {event['step']}: saved {event['path']} in {format_seconds(event['seconds'])}"
            )
        elif kind == "experts":
            self._experts(event)
        elif kind == "end":
            self._end(event)
        elif kind in NOTICES:
            self._print(notice(event))

    def close(self) -> None:
        """Release the terminal; nothing to do for plain lines."""

    def _print(self, text: str) -> None:
        if self._console.is_terminal:  # a file has a line for each event
            text = folded(text, self._console.width)
        self._console.print(text, soft_wrap=True, markup=False)

    def _step(self, event: Mapping[str, Any]) -> None:
        self._print(step_line(event, self._start, self._remaining_s(event)))

    def _experts(self, event: Mapping[str, Any]) -> None:
        """Print a line on expert load at the last step, or if the count of idle experts changes."""
        dead, is_last = len(event["dead"]), event["step"] == self._start.get("steps")
        if dead != self._dead or is_last:
            self._print(experts_line(event))
        self._dead = dead

    def _remaining_s(self, event: Mapping[str, Any]) -> float:
        """Return the seconds until the last step, at the median time of recent steps."""
        left = self._start.get("steps", event["step"]) - event["step"]
        return float(median(self._pace) * left)

    def _end(self, event: Mapping[str, Any]) -> None:
        if event["stopped"] and event["step"] == self._start.get("from_step"):
            is_last = event["step"] == self._start.get("steps")
            when = "after the last step" if is_last else f"before step {event['step'] + 1}"
            self._print(f"stopped on request {when}")
            return
        verb = "stopped on request" if event["stopped"] else "done"
        text = f"{verb} after {counted(event['step'], 'step')}: loss {number(event['loss'])} nats"
        entropy = self._start.get("unigram_entropy")
        if entropy is not None:
            text += f", unigram entropy of the data {number(entropy)} nats"
        if early := event.get("early"):
            text += f". Ended early: {early}"
        self._print(text)


class QuietView(View):
    """Prints only problems and how the run ended."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Print an event unless its kind occurs in every run."""
        if event["event"] == "start":
            self._start = event
        if event["event"] not in _CHATTER:
            super().write(event)


class LiveView(View):
    """Redraws a block with the latest step and a progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        # Redrawn on events alone: a timer would take time from ranks that share the cores.
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()
        self._trend = Trend(is_ascii=console.options.ascii_only)

    def write(self, event: Mapping[str, Any]) -> None:
        """Show an event; the trend of losses starts again when a run restarts."""
        if event["event"] == "start":
            self._trend.clear()
        super().write(event)

    def _step(self, event: Mapping[str, Any]) -> None:
        self._trend.add(event["step"], event["loss"])
        block = step_block(event, self._start, self._remaining_s(event), self._trend.text)
        self._live.update(block, refresh=True)

    def _end(self, event: Mapping[str, Any]) -> None:
        self._live.stop()
        super()._end(event)

    def close(self) -> None:
        """Stop redrawing, leaving the last block on the screen."""
        self._live.stop()


def number(value: float | str) -> str:
    """Format a loss; events have non-finite numbers as text."""
    return value if isinstance(value, str) else f"{value:.4f}"


def experts_line(event: Mapping[str, Any]) -> str:
    """Return an "experts" event as a line on tokens per expert and dropped tokens."""
    if event.get("routing") == "balanced":
        return (
            f"step {event['step']}: experts: tokens met them in turn, by train.routing = balanced"
        )
    total = sum(len(row) for row in event["tokens"])
    dead = len(event["dead"])
    none = f"{dead} of {counted(total, 'expert')} met no token" if dead else "all met tokens"
    dropped = dropped_share(event)
    text = (
        f"step {event['step']}: experts: {none}, the busiest of a layer met "
        f"{1 + event['expert_excess']:.2f} times the mean"
    )
    return f"{text}, {dropped:.1%} of pairs dropped" if dropped else text


def start_line(event: Mapping[str, Any]) -> str:
    """Return a "start" event as a line: parameters, ranks, device, layout and tokens."""
    tokens = event["train_tokens"]
    tokens_text = "a stream" if tokens is None else f"{format_count(tokens)} training tokens"
    text = (
        f"{format_count(event['parameters'])} parameters on {counted(event['world'], 'rank')} of "
        f"{event['device']}: layout {Layout(**event['layout']).label}; {tokens_text}"
    )
    entropy = event["unigram_entropy"]
    return text if entropy is None else f"{text}, unigram entropy {number(entropy)} nats"


def step_line(event: Mapping[str, Any], start: Mapping[str, Any], left_s: float) -> str:
    """Return a "step" event as a line; `left_s` is the time until the end of the run."""
    mfu = "" if event["mfu"] is None else f" mfu {event['mfu']:.1%}"
    peak = max(event["peak_memory_bytes"].values())
    return (
        f"step {event['step']}/{start.get('steps', '?')} loss {number(event['loss'])} "
        f"norm {number(event['grad_norm'])} lr {event['lr']:.2e} "
        f"{event['tokens_per_s']:.0f} tok/s ({event['tokens_per_s_per_device']:.0f} per device)"
        f"{mfu} peak {format_bytes(peak)} eta {format_seconds(left_s)}"
    )


def step_block(
    event: Mapping[str, Any], start: Mapping[str, Any], left_s: float, trend: str = ""
) -> Group:
    """Return a "step" event as a block of at most 80 columns, with the trend of the loss."""
    steps = start.get("steps", event["step"])
    table = Table.grid(padding=(0, 2))
    peak_rank, peak = max(event["peak_memory_bytes"].items(), key=lambda item: item[1])
    rows = [
        ("step", f"{event['step']} of {steps}", "loss", number(event["loss"])),
        ("grad norm", number(event["grad_norm"]), "lr", f"{event['lr']:.2e}"),
        (
            "tokens/s",
            f"{event['tokens_per_s']:,.0f}",
            "per device",
            f"{event['tokens_per_s_per_device']:,.0f}",
        ),
        (
            name_in_events(str(start.get("device", ""))),
            f"{format_bytes(peak)} (rank {peak_rank})",
            "data wait",
            f"{event['data_time_share']:.1%}",
        ),
        (
            "step time",
            format_seconds(event["step_time_s"]),
            "TFLOP/s per device",
            f"{event['tflops_per_device']:.3g}",
        ),
    ]
    for row in rows:
        table.add_row(
            *(Text(text, "dim" if index % 2 == 0 else "bold") for index, text in enumerate(row))
        )
    bar = Table.grid(padding=(0, 1))
    eta = f"eta {format_seconds(left_s)}"
    bar.add_row(ProgressBar(total=steps, completed=event["step"], width=50), Text(eta))
    lines = [Text.assemble(("loss  ", "dim"), trend)] if trend else []
    if event["mfu"] is not None:  # the device's peak is stated
        lines.append(Text.assemble(("MFU  ", "dim"), f"{event['mfu']:.1%}"))
    return Group(table, *lines, bar)


class Room:
    """Detects that the disk of a run folder becomes full."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._was_full = folder, False

    def new(self) -> list[dict[str, Any]]:
        """Return a "disk_full" event in a list if the disk has become full since the last call."""
        was_full, self._was_full = self._was_full, is_full(self._folder)
        if was_full or not self._was_full:
            return []
        return [{"event": "disk_full", "path": str(self._folder)}]


class EventTail:
    """Reads new lines of an `events.jsonl` to which another process appends."""

    def __init__(
        self,
        path: Path,
        *,
        only_new: bool = False,
        read: Callable[[bytes], dict[str, Any] | None] = parse_json,
    ) -> None:
        """Start at the beginning of the file or, with `only_new`, after its last complete line.

        `read` parses a line; lines for which it returns None are skipped.
        """
        self._path, self._at, self._read = path, 0, read
        if only_new and path.is_file():
            self._at = path.read_bytes().rfind(b"\n") + 1

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines written since the last call, parsed."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                if (event := self._read(line)) is not None:
                    yield event
