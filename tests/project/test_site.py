"""The site: complete, searched from disk, quiet towards other hosts, each answer in two clicks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROW = re.compile(r"^\| (.+\?.*) \| \[.+\]\(([^)#]+)(#[^)]+)?\) \| (\d) \|$", re.MULTILINE)
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
# The sidebar shows each page of it at once only if its sections are open.
IN_SIDEBAR = set(re.findall(r": ([\w/.-]+\.md)$", SITE.partition("\nnav:")[2], re.MULTILINE))
# What a browser loads by itself; links wait for a click.
OUTSIDE = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=.?(?:https?:)?//[^>]*"
)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the folder of the site and what its build said."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(built):
    """All pages are in it, and links lead somewhere."""
    site, said = built
    pages = {page.relative_to(site).with_suffix(".md") for page in site.rglob("*.html")}
    written = {page.relative_to(DOCS) for page in DOCS.rglob("*.md")}
    missing = {page for page in written if page.name != "README.md"} - pages
    assert not missing
    assert "not found in the documentation files" not in said


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_hosts(built):
    site, _ = built
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        assert not OUTSIDE.search(page.read_text(encoding="utf-8")), page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*.?(?:https?:)?//", style.read_text()), style.name


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: {BROWSERS}")
def test_the_search_works_from_disk(built):
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page, asked = browser.new_page(), []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((built[0] / "index.html").as_uri())
        page.evaluate("document.querySelector('[data-md-toggle=search]').click()")
        page.wait_for_function("typeof __index == 'object'", timeout=60_000)
        page.wait_for_selector("text=Type to start searching", state="attached", timeout=60_000)
        page.type("input[name=query]", "ulysses")
        found = page.wait_for_selector("a.md-search-result__link", timeout=60_000)
        assert found.get_attribute("href")
        assert asked
        assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)
        browser.close()


def anchors(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_thirty_questions_are_answered_in_two_clicks():
    rows = ROW.findall((DOCS / "questions.md").read_text(encoding="utf-8"))
    table = [line for line in (DOCS / "questions.md").read_text().splitlines() if "](" in line]
    assert len(rows) == len(table) >= 30
    assert len({question for question, *_ in rows}) == len(rows)
    assert {"navigation.sections", "navigation.expand"} <= set(re.findall(r"navigation\.\w+", SITE))
    for question, page, anchor, stated in rows:
        assert (DOCS / page).exists(), question
        assert page in IN_SIDEBAR, f"{question}: {page} is not in the sidebar"
        if anchor:
            assert anchor[1:] in anchors(DOCS / page), f"{question}: {page} has no {anchor}"
        clicks = 1 + bool(anchor)  # on the page in the sidebar, then in its table of contents
        assert clicks == int(stated) <= 2, question


def test_each_picture_is_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = "".join(page.read_text(encoding="utf-8") for page in pages)
    pictures = [path for path in (ROOT / "docs" / "images").rglob("*.*") if path.is_file()]
    assert pictures
    assert [path.name for path in pictures if path.name not in texts] == []
