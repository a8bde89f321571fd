"""Draws the pictures of `docs/images/report`: real runs, plans and simulations, as pages.

    python docs/draw_reports.py [--only NAME ...] [--work FOLDER] [--views FOLDER]

It trains small models on 4 ranks of this machine, makes their pages, and takes pictures of them
in a headless Chromium. It needs playwright and Pillow, some minutes, and an idle machine.
`--views` also draws them narrow, dark, on paper and as seen without red, into a folder: to look at.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from meshwright.cli import main

FOLDER = Path(__file__).parent / "images" / "report"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# What a picture of a page shows: the width, the theme, the paper or screen, and how it is seen.
VIEWS = {
    "1440": {"width": 1440},
    "390": {"width": 390},
    "dark": {"width": 1440, "color_scheme": "dark"},
    "print": {"width": 702, "media": "print"},
    "protanopia": {"width": 1440, "vision": "protanopia"},
}
SHOWN = "1440"
# Pages that the docs show no picture of.
UNSHOWN = ("failed", "layouts", "simulation")
# A picture is cut below, so that it stays readable in a document.
TALLEST = 5200
SMALL = [
    *("model.dim=128", "model.n_layers=8", "model.n_heads=4", "model.n_kv_heads=4"),
    *("train.seq_len=128", "train.batch=16", "cluster.device=cpu", "checkpoint.every=0"),
]
PIPELINES = {
    "1f1b": ("layout.schedule=1f1b",),
    "interleaved": ("layout.schedule=interleaved_1f1b", "layout.virtual_stages=2"),
    "zero-bubble": ("layout.schedule=interleaved_zero_bubble", "layout.virtual_stages=2"),
}
SIX = (
    *("dp4 mb4", "tp2 dp2 mb4", "tp4 mb4", "pp2 dp2 1f1b mb2", "pp4 1f1b mb1"),
    "shard4 zero3 mb4",
)
LARGE = [
    *("model.preset=llama-3-70b", "cluster.preset=h100-sxm", "cluster.nodes=64"),
    *("train.batch=1024", "train.seq_len=8192", "train.precision=bf16"),
]


def meshwright(*words: object) -> None:
    """Run a command, which has to end well."""
    code = main([str(word) for word in words])
    if code:
        raise SystemExit(f"meshwright {words[0]} ended with {code}")


def train(work: Path, name: str, *overrides: str) -> Path:
    """Train, and return the run's page."""
    where = (f"log.dir={work}", f"log.name={name}", f"data.cache={work / 'cache'}")
    meshwright("train", *overrides, *where)
    meshwright("report", work / name)
    return work / name / "report" / "index.html"


def demo(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the page of a run like the demo's."""
    example = str(Path(__file__).parents[1] / "examples" / "demo.toml")
    yield "demo", train(work, "demo", example, "train.steps=200")


def pipelines(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the pages of pipelines of 4 stages, and of all of them side by side."""
    shared = (*SMALL, "train.steps=24", "layout.pp=4", "layout.microbatch=1", "train.eval_every=8")
    for name, schedule in PIPELINES.items():
        yield name, train(work, name, *shared, "layout.dp_replicate=1", *schedule)
    out = work / "compared.html"
    meshwright("report", *(work / name for name in PIPELINES), "--out", out)
    yield "compared", out


def first(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the page that the README shows a part of: two stages, as many as there are cores."""
    sizes = ("model.dim=256", "model.n_layers=8", "model.n_heads=4", "model.n_kv_heads=4")
    steps = ("train.batch=16", "train.seq_len=256", "train.steps=12", "cluster.device=cpu")
    schedule = ("layout.pp=2", "layout.dp_replicate=1", "layout.microbatch=2")
    yield "first", train(work, "first", *sizes, *steps, *schedule, *PIPELINES["interleaved"])


def failed(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the page of a run whose loss diverges, at a rate that is much too high."""
    steps = ("train.steps=60", "train.clip_norm=1e9", "layout.dp_replicate=2")
    steps += ("optimizer.lr=20", "optimizer.schedule=constant", "optimizer.warmup_steps=60")
    where = (f"log.dir={work}", "log.name=failed", f"data.cache={work / 'cache'}")
    main(["train", *SMALL, *steps, "layout.microbatch=4", *where])
    meshwright("report", work / "failed")
    yield "failed", work / "failed" / "report" / "index.html"


def layouts(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the page of six layouts side by side."""
    out = work / "layouts.html"
    meshwright("bench", "layouts", *SMALL, "--rounds", 3, "--layout", *SIX, "--html", out)
    yield "layouts", out


def planned(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the page of a plan for 512 devices."""
    out = work / "plan.html"
    meshwright("plan", *LARGE, "--top", 8, "--html", out)
    yield "plan", out


def simulated(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the page of a simulation of 64 devices."""
    out = work / "simulation.html"
    layout = ("layout.pp=4", "layout.tp=4", "layout.sp=true", "layout.zero=1")
    sizes = ("model.preset=llama-2-7b", "cluster.preset=h100-sxm", "cluster.nodes=8")
    sizes = (*sizes, "train.batch=64", "train.seq_len=4096", "train.precision=bf16")
    meshwright("simulate", *sizes, *layout, "--world", 64, "--html", out)
    yield "simulation", out


MADE: dict[str, Callable[[Path], Iterator[tuple[str, Path]]]] = {
    "demo": demo,
    "pipelines": pipelines,
    "first": first,
    "failed": failed,
    "layouts": layouts,
    "plan": planned,
    "simulation": simulated,
}


def draw(page: Page, html: Path, view: Mapping[str, Any], out: Path) -> None:
    """Take a picture of a page that has drawn all its charts."""
    page.set_viewport_size({"width": view["width"], "height": 900})
    page.emulate_media(media="screen", color_scheme=view.get("color_scheme", "light"))
    seen = {"type": view.get("vision", "none")}
    page.context.new_cdp_session(page).send("Emulation.setEmulatedVisionDeficiency", seen)
    page.goto(html.resolve().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    if view.get("media") == "print":
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.wait_for_timeout(2000)
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    shot = shot.crop((0, 0, shot.width, min(shot.height, TALLEST)))
    shot.quantize(160, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        out, optimize=True
    )
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB")


def draw_part(page: Page, html: Path, out: Path) -> None:
    """Take a picture of a step's timeline and memory alone."""
    page.goto(html.resolve().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    page.locator("nav").evaluate("nav => nav.remove()")
    top, bottom = (page.locator(name).bounding_box() for name in ("#steps", "#memories"))
    assert top is not None
    assert bottom is not None
    height = bottom["y"] + bottom["height"] - top["y"]
    part = {"x": top["x"] - 16, "y": top["y"], "width": top["width"] + 32, "height": height}
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=part))).convert("RGB")
    shot.quantize(160, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        out, optimize=True
    )


def run(names: Sequence[str], work: Path, views: Path | None) -> None:
    """Make the pages and draw those that the docs show; all of them, in each view, into `views`."""
    browser = next(path for name in BROWSERS if (path := shutil.which(name)))
    for folder in filter(None, (FOLDER, views)):
        folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for title, html in chain.from_iterable(MADE[name](work) for name in names):
            # Each picture has a tab of its own: an emulated vision would colour the next one, too.
            if title == "first":
                page = opened.new_page(viewport={"width": 1440, "height": 900})
                draw_part(page, html, FOLDER / "first.png")
            elif title not in UNSHOWN:
                draw(opened.new_page(), html, VIEWS[SHOWN], FOLDER / f"{title}-{SHOWN}.png")
            for name, view in VIEWS.items() if views is not None else ():
                draw(opened.new_page(), html, view, views / f"{title}-{name}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MADE, default=list(MADE))
    parser.add_argument("--work", type=Path, help="keep runs and pages in this folder")
    parser.add_argument("--views", type=Path, help="draw all views into this folder, too")
    given = parser.parse_args()
    if given.work:
        given.work.mkdir(parents=True, exist_ok=True)
        run(given.only, given.work, given.views)
    else:
        with tempfile.TemporaryDirectory() as made:
            run(given.only, Path(made), given.views)
