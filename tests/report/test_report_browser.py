"""Pages opened from disk in a browser: quiet, offline, complete, and usable by hand and by keys."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.report.ahead import layouts_page
from meshwright.report.run_page import report
from meshwright.spec.loading import load_config
from run_folders import write_run
from runs import TINY

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
READY = "html[data-ready]"
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.early,
    pytest.mark.slow,  # set-up installs no browser; `python -m ci.extras chromium` does
    pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: {NAMES}"),
]

KINDS = (*("run", "interleaved", "zero-bubble", "plain", "several", "layouts", "simulation"),)
RUNS = {
    "1f1b": ["layout.pp=4"],
    "zbv": ["layout.pp=4", "layout.schedule=zbv", "layout.virtual_stages=2"],
    "loop": ["layout.pp=4", "layout.schedule=interleaved_1f1b", "layout.virtual_stages=2"],
    "tp": ["layout.tp=2", "layout.dp_shard=2", "layout.zero=3"],
}


def some_slow(others):
    """Return the kinds of pages, all but `others` marked slow."""
    return [
        kind if kind in others else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS
    ]


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def page_of(tmp_path_factory, corpus):
    """Return a function from a kind of page to its file, which it makes when first asked."""
    root = tmp_path_factory.mktemp("pages")
    fixed = [*TINY, f"data.source={corpus}", f"data.cache={root / 'cache'}", f"log.dir={root}"]
    fixed += [
        "model.n_kv_heads=2",
        "model.n_layers=8",
        "train.batch=16",
        "layout.dp_replicate=1",
        "layout.microbatch=1",
    ]

    @functools.cache
    def run(name):
        return write_run(load_config(None, [*fixed, *RUNS[name], f"log.name={name}"]))

    def measured():
        row = {"step_time_s": 0.5, "step_times_s": [0.4, 0.6], "tokens_per_s": 100.0}
        row |= {"predicted_step_time_s": 0.45}
        labels = ("dp2 mb1", "shard2 zero3 mb1", "tp2 sp mb1", "cp2-ring mb1", "pp2 1f1b mb1")
        rows = [{**row, "layout": label} for label in (*labels, "pp2 zbv v2 mb1 recompute-full")]
        return layouts_page({"machine": "two cores", "rows": rows}).html()

    def simulated():
        path = root / "simulated.html"
        assert main(["simulate", *fixed, "layout.pp=2", "--html", str(path)]) == 0
        return path.read_text()

    makers = {
        "run": lambda: report([run("1f1b")]),
        "interleaved": lambda: report([run("loop")]),
        "zero-bubble": lambda: report([run("zbv")]),
        "plain": lambda: report([run("tp")]),
        "several": lambda: report([run("1f1b"), run("zbv"), run("tp")]),
        "layouts": measured,
        "simulation": simulated,
    }

    @functools.cache
    def made(kind):
        path = root / f"{kind}.html"
        path.write_text(makers[kind]())
        return path

    return made


@pytest.fixture
def show(browser, page_of):
    """Return a function that opens a page and returns it with what it said and asked for."""
    contexts = []

    def opened(kind, width=1440, **more):
        context = browser.new_context(viewport={"width": width, "height": 900}, **more)
        contexts.append(context)
        page = context.new_page()
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_of(kind).as_uri())
        page.wait_for_selector(READY, timeout=30_000, state="attached")
        return page, said, asked

    yield opened
    for context in contexts:
        context.close()


# Texts of charts that stick out of their chart, or lie over another text of it.
CLIPPED = """() => [...document.querySelectorAll('.plot')].flatMap((plot) => {
  const box = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('svg text')].filter((text) => {
    const at = text.getBoundingClientRect();
    if (!at.width || getComputedStyle(text).visibility === 'hidden') return false;
    return at.left < box.left - 1 || at.right > box.right + 1 ||
      at.top < box.top - 1 || at.bottom > box.bottom + 1;
  }).map((text) => plot.id + ': ' + text.textContent);
})"""
OVERLAPS = """() => [...document.querySelectorAll('.plot')].flatMap((plot) => {
  const kinds = ['.xtick text, .x2tick text', '.ytick text, .y2tick text', '.annotation text'];
  return kinds.flatMap((kind) => {
    const all = [...plot.querySelectorAll(kind)].filter((t) => t.getBoundingClientRect().width);
    return all.flatMap((one, at) => all.slice(at + 1).filter((other) => {
      const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
      return a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 &&
        b.top < a.bottom - 3;
    }).map((other) => plot.id + ': ' + one.textContent + ' / ' + other.textContent));
  });
})"""
EMPTY = """() => [...document.querySelectorAll('.plot')].filter((plot) =>
  ![...plot.querySelectorAll('.cartesianlayer path, .cartesianlayer image')].some((drawn) =>
    drawn.getBoundingClientRect().width > 2 && !drawn.closest('.gridlayer')))
  .map((plot) => plot.id)"""


@pytest.mark.parametrize("kind", some_slow(("run", "layouts")))
def test_a_page_opens_quietly_offline_and_whole(show, page_of, kind):
    page, said, asked = show(kind)
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.locator(".plot").count() > 0
    assert page.evaluate(EMPTY) == []
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate(OVERLAPS) == []
    assert page_of(kind).stat().st_size < 2**20


@pytest.mark.parametrize("kind", some_slow(("layouts",)))
def test_charts_offer_nothing_that_leaves_the_page(show, kind):
    page, _, asked = show(kind)
    offered = page.evaluate(
        "[...document.querySelectorAll('.modebar-btn')].map((b) => b.getAttribute('data-title'))"
    )
    ours = {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}
    assert set(offered) <= ours
    assert "Download plot as a PNG" in offered
    for button in page.locator(".modebar-btn").all()[:12]:
        button.dispatch_event("click")
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len(page.context.pages) == 1  # nor does a button open a window


@pytest.fixture(scope="module")
def axe():
    """The code of axe-core, of the package that brings it."""
    found = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    return (Path(found.__file__).parent / "axe.min.js").read_text()


def violations(page, axe):
    """What axe-core finds on a page, all of it unfolded."""
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert found["passes"]
    return [
        (one["id"], node["html"][:120], node["failureSummary"][:300])
        for one in found["violations"]
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["run", "several", "simulation"])
def test_axe_finds_nothing(show, axe, kind, scheme):
    page, _, _ = show(kind, color_scheme=scheme)
    assert violations(page, axe) == []


@pytest.mark.parametrize("kind", some_slow(("run",)))
def test_a_page_fits_a_phone(show, kind):
    page, said, _ = show(kind, width=390)
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate(OVERLAPS) == []
    ends = "[...document.querySelectorAll('nav a')].map((a) => a.getBoundingClientRect().right)"
    assert max(page.evaluate(ends)) <= 390  # each section's link is seen


@pytest.mark.perf
def test_a_page_is_usable_within_two_seconds(show):
    show("layouts")  # the browser's own start is not the page's
    times = []
    for _ in range(3):
        page, _, _ = show("run")
        times.append(float(page.evaluate("document.documentElement.dataset.usable")))
        page.close()
    assert min(times) < 2000


def test_hover_names_the_action_and_dragging_zooms(show):
    page, _, _ = show("run")
    plot = page.locator("#timeline")
    plot.scroll_into_view_if_needed()
    box = plot.locator(".bars .point path").last.bounding_box()
    bars = plot.locator(".trace.bars").filter(has_text="15").first.locator(".point path")
    box = bars.last.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    hover = plot.locator(".hoverlayer .hovertext")
    hover.first.wait_for()
    assert "microbatch 15" in hover.first.text_content()
    before = page.evaluate("document.getElementById('timeline').layout.xaxis.range")
    page.mouse.move(box["x"] - 300, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] - 100, box["y"] + 6, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "before => document.getElementById('timeline').layout.xaxis.range[0] > before[0]",
        arg=before,
    )
    after = page.evaluate("document.getElementById('timeline').layout.xaxis.range")
    assert before[0] < after[0] < after[1] < before[1]


def test_keys_reach_the_controls(show):
    page, _, _ = show("run")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
        if reached[-1] == "Zoom in":
            break
    assert reached[-1] == "Zoom in"
    assert "Numbers of this chart" in reached
    whole = page.evaluate("document.getElementById('timeline').layout.xaxis.range")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "whole => document.getElementById('timeline').layout.xaxis.range[0] > whole[0]", arg=whole
    )
    low, high = page.evaluate("document.getElementById('timeline').layout.xaxis.range")
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2)
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


SEEN = """() => {
  const one = document.activeElement;
  const box = one.getBoundingClientRect();
  const ways = [];
  for (let up = one; up; up = up.parentElement) ways.push(Number(getComputedStyle(up).opacity));
  return { name: one.outerHTML.slice(0, 120), is_body: one === document.body,
    is_seen: box.width > 0 && box.right > 0 && Math.min(...ways) > 0.4 };
}"""


@pytest.mark.parametrize("kind", some_slow(("run",)))
def test_every_stop_of_the_tab_key_is_seen(show, kind):
    page, _, _ = show(kind)
    page.mouse.move(1, 1)
    stops = 0
    for _ in range(400):
        page.keyboard.press("Tab")
        at = page.evaluate(SEEN)
        if at["is_body"]:
            break
        stops += 1
        assert at["is_seen"], at["name"]
    assert at["is_body"]
    assert 4 < stops < 80


def test_a_rank_can_be_chosen(show):
    page, _, _ = show("run")
    select = page.locator("select[data-for=memory]")
    assert "peak" in select.locator("option").first.inner_text()
    most = "Math.max(...document.getElementById('memory').data.map((one) => Math.max(...one.y)))"
    held = "JSON.stringify(document.getElementById('memory').data.map((one) => one.y))"
    before = page.evaluate(held)
    select.select_option(index=3)
    page.wait_for_function(f"before => {held} != before", arg=before)
    assert page.evaluate(most) > 0


def test_dark_and_light(show):
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "document.getElementById('loss').layout.font.color"
    page, _, _ = show("plain", color_scheme="dark")
    assert page.evaluate(paper) == "rgb(18, 23, 29)"
    dark = page.evaluate(ink)
    page.get_by_role("button", name="Switch to light").click()
    page.wait_for_function(f"{ink} != {json.dumps(dark)}")
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Switch to dark").wait_for()


def test_print_is_four_pages_of_white_paper(show):
    page, _, _ = show("run", color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not page.locator("details").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.wait_for_function("document.getElementById('loss').layout.width === 690")
    assert not page.locator("nav").is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function("document.getElementById('loss').layout.width !== 690")
    printed = page.pdf(format="A4")
    assert len(printed) > 50_000
    assert 1 < len(re.findall(rb"/Type\s*/Page\b", printed)) <= 4


def test_a_page_runs_no_script_but_its_own(browser, page_of, tmp_path):
    """Where a name got into a page as HTML after all, it would do nothing."""
    deed = "document.title = 'changed'"
    html = page_of("layouts").read_text()
    strange = f'<script>{deed}</script><img src="data:," onerror="{deed}">'
    strange += '<script src="data:text/javascript,document.title=1"></script>'
    file = tmp_path / "page.html"
    file.write_text(html.replace("</header>", f"</header>{strange}"))
    page = browser.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(file.as_uri())
    page.wait_for_selector(READY, timeout=30_000, state="attached")
    assert page.title() not in ("changed", "1")
    assert len([text for text in said if "Content Security Policy" in text]) == 3
    page.close()
