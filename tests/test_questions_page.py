"""The page of 30 questions: each link leads to its answer, in the number of clicks that it says."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
ROW = re.compile(r"^\| (.+\?.*) \| \[.+\]\(([^)#]+)(#[^)]+)?\) \| (\d) \|$", re.MULTILINE)
SITE = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
# The sidebar shows each page of it at once only if its sections are open.
IN_SIDEBAR = set(re.findall(r": ([\w/.-]+\.md)$", SITE.partition("\nnav:")[2], re.MULTILINE))


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
