"""Draws demo.svg from the events of a run: plain SVG, written by hand, with no dependency.

python docs/images/draw_demo.py runs/latest/events.jsonl docs/images/demo.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 132, 58, 54
INK, SOFT, GRID = "#1f2933", "#52606d", "#e4e7eb"
TRAIN, HELD_OUT, ENTROPY = "#2563eb", "#c2410c", "#52606d"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Axes:
    """From steps and nats to places on the page."""

    def __init__(self, steps: int, top: float) -> None:
        self.steps, self.top = steps, top

    def x(self, step: float) -> float:
        """Return the place of a step."""
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps

    def y(self, nats: float) -> float:
        """Return the place of a loss."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nats / self.top


def text(x: float, y: float, words: str, fill: str = SOFT, more: str = "") -> str:
    """Return one line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" {more}>{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, more: str = "") -> str:
    """Return a straight line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{stroke}" {more}/>'


def frame(axes: Axes, title: str) -> list[str]:
    """Return the card, the title, the grid, the ticks and the axis labels."""
    parts = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#ffffff" '
        f'stroke="{GRID}"/>',
        text(LEFT, 30, title, INK, 'font-size="15" font-weight="600"'),
    ]
    for nats in range(int(axes.top) + 1):
        y = axes.y(nats)
        parts.append(line(LEFT, y, WIDTH - RIGHT, y, GRID))
        parts.append(text(LEFT - 10, y + 4, str(nats), more='text-anchor="end"'))
    for quarter in range(5):
        step = axes.steps * quarter / 4
        x = axes.x(step)
        parts.append(line(x, axes.y(0), x, axes.y(0) + 5, SOFT))
        parts.append(text(x, axes.y(0) + 20, f"{step:g}", more='text-anchor="middle"'))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 22 {middle:.1f})"'
    parts.append(text(22, middle, "loss, nats per token", more=turned))
    parts.append(text(axes.x(axes.steps / 2), HEIGHT - 12, "step", more='text-anchor="middle"'))
    return parts


def labels(axes: Axes, wanted: list[tuple[float, str, str]], gap: float = 17) -> list[str]:
    """Return labels (loss, words, colour) right of the plot, moved apart where they would touch."""
    parts, lowest = [], -gap
    for nats, words, colour in sorted(wanted, reverse=True):
        y = max(axes.y(nats) + 4, lowest + gap)
        parts.append(text(WIDTH - RIGHT + 10, y, words, colour, 'font-weight="600"'))
        lowest = y
    return parts


def draw(events: list[dict[str, Any]]) -> str:
    """Return the picture of a run's training loss, held-out loss and unigram entropy."""
    start = next(e for e in events if e["event"] == "start")
    steps = [(e["step"], e["loss"]) for e in events if e["event"] == "step"]
    held_out = [(e["step"], e["loss"]) for e in events if e["event"] == "eval"]
    entropy = start["unigram_entropy"]
    axes = Axes(start["steps"], int(max(loss for _, loss in steps)) + 1)
    millions = start["parameters"] / 1e6
    title = f"{millions:.1f}M-parameter Llama, {start['world']} CPU ranks, bytes of Python sources"
    parts = frame(axes, title)
    y = axes.y(entropy)
    parts.append(line(LEFT, y, WIDTH - RIGHT, y, ENTROPY, 'stroke-dasharray="6 4"'))
    points = " ".join(f"{axes.x(step):.1f},{axes.y(loss):.1f}" for step, loss in steps)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{TRAIN}" stroke-width="2"/>')
    for step, loss in held_out:
        parts.append(
            f'<circle cx="{axes.x(step):.1f}" cy="{axes.y(loss):.1f}" r="5" fill="{HELD_OUT}" '
            'stroke="#ffffff" stroke-width="2"/>'
        )
    wanted = [(entropy, f"unigrams {entropy:.2f}", ENTROPY)]
    wanted.append((steps[-1][1], f"training {steps[-1][1]:.2f}", TRAIN))
    if held_out:
        wanted.append((held_out[-1][1], f"held-out {held_out[-1][1]:.2f}", HELD_OUT))
    parts += labels(axes, wanted)
    said = f"Loss over {start['steps']} steps: training, held-out, and the unigram entropy"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img" font-size="13" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{said}</title>",
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/images/draw_demo.py EVENTS.jsonl OUT.svg")
    Path(sys.argv[2]).write_text(draw(read(Path(sys.argv[1]))), encoding="utf-8")
