"""The site: complete, searched from disk, quiet towards other hosts, each answer in two clicks."""

import importlib.util
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROW = re.compile(r"^\| (.+\?.*) \| \[.+\]\(([^)#]+)(#[^)]+)?\) \|$", re.MULTILINE)
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


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: {BROWSERS}")
def test_in_the_dark_pictures_are_dark_and_the_matrix_is_folded(built):
    """Pictures were white in dark mode, and the support matrix was 52,000 px high."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        shades = {}
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
            page.goto((built[0] / "tutorial.html").as_uri())
            shot = image.open(io.BytesIO(page.locator("article img").first.screenshot()))
            shades[scheme] = max(shot.convert("L").getcolors())[1]  # that of most pixels
        assert shades["light"] > 200
        assert shades["dark"] < 60
        page.goto((built[0] / "records" / "support-matrix.html").as_uri())
        assert page.evaluate("document.documentElement.scrollHeight") < 12_000
        row = page.locator("details td").first
        assert row.is_hidden()
        page.locator("details summary").first.click()
        assert row.is_visible()
        browser.close()


@pytest.mark.slow
def test_the_api_is_named_as_users_import_it(built):
    """Headings were paths such as `meshwright.parallel.user_models.parallelize.parallelize`."""
    text = (built[0] / "api.html").read_text(encoding="utf-8")
    headed = set(re.findall(r'<h3 id="([\w.]+)" class="doc doc-heading"', text))
    names = {name.removeprefix("meshwright.") for name in headed}
    assert "__repr__" not in text
    assert names - {"checkpoint.own.Loaded"} <= set(mw.__all__)
    # `prove` is a module, too; the page shows the function by its other name.
    assert set(mw.__all__) - names == {"__version__", "prove"}


@pytest.mark.slow
def test_each_page_has_the_version_and_the_repository_on_request(built, monkeypatch):
    text = (built[0] / "index.html").read_text(encoding="utf-8")
    assert f"Meshwright {mw.__version__}" in text
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    menu = [{"Start": "index.md"}]
    monkeypatch.delenv("REPOSITORY", raising=False)
    assert hooks.on_config({"site_name": "Meshwright", "nav": menu})["nav"] == menu
    monkeypatch.setenv("REPOSITORY", "https://example.org/a")
    changed = hooks.on_config({"site_name": "Meshwright", "nav": menu})["nav"]
    assert changed == [*menu, {"Repository": "https://example.org/a"}]


@pytest.mark.slow
def test_thirty_questions_are_answered_in_two_clicks(built):
    """The first page's menu links to the answer's page, whose table of contents has its place."""
    site, _ = built
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    table = [line for line in text.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) == len(table) >= 30
    assert len({question for question, *_ in rows}) == len(rows)
    menu = re.findall(r'<a href="([^"]+)" class="md-nav__link', (site / "index.html").read_text())
    for question, page, anchor in rows:
        built_page = page.replace("README.md", "index.html").replace(".md", ".html")
        assert built_page in menu, f"{question}: {page} is not in the menu"
        if anchor:
            contents = re.findall(
                r'<a href="(#[^"]+)" class="md-nav__link', (site / built_page).read_text()
            )
            assert anchor in contents, f"{question}: {page} has no {anchor}"


def test_each_picture_is_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = "".join(page.read_text(encoding="utf-8") for page in pages)
    pictures = [path for path in (ROOT / "docs" / "images").rglob("*.*") if path.is_file()]
    assert pictures
    assert [path.name for path in pictures if path.name not in texts] == []
