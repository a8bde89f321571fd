"""A prose check: the docs, messages and docstrings in plain, native technical English.

A small vocabulary of phrases that made readers stop, each with its replacement. Text in backticks
or code blocks, tables that commands write, and the log of experiments are left out. In the packages
of `NAMED`, variables and parameters have names that say what a value is.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_NOUNS = (
    "age file folder integer key linear list model multiple number object plan preset run schedule "
    "size step strategy tensor value"
)
NO_NOUN = rf"(?<!there.)(?:is|are) no (?:{'|'.join(_NOUNS.split())})"
# Of any text: what is not written, and what to write.
EVERYWHERE = {
    r"held against": "compared with",
    r"for want of": "because ... ran out, for lack of",
    r"one's own": "your own",
    r"all else": "everything else",
    r"dealt out": "distributed",
    r"killed and gone on with": "killed and resumed",
    r"no cost of \S+ is told from": "shows no overhead of ...",
    r"what is told of (?:it|them)": "what is reported about it",
    r"(?:has|have|is|are) amiss": "has a problem",
    r"in doubt of": "if ... is uncertain",
    NO_NOUN: "is not a ...",
    r"a node by": "8 per node over NVLink",
    r"why not: it is the best": "fastest",
    r"of which \S+ reads": "69 passes over the data",
    r"off by -": "48% too low",
    r"gone, last seen: ": "exited normally",
    r"(?:noticed|ready again|done again) [\d.]+ ?m?s": "detected in, restarted in, recomputed in",
    r"currency of the price": "say which",
    r"which is not here": "which is not installed",
    r"what it rests on": "basis",
    r"take it with you": "copy commands",
    r"is no choice": "is not possible, because ...",
    r"time a token": "time per token",
    r"what is there": "features",
}
# Of pages, where all hits are gone; code still has some of these.
PAGES = EVERYWHERE | {
    r"(?:go|goes|going|gone|went) on(?! (?:the|a|each|one)\b)": "continue, resume",
    r"(?:is|are|was|were|be|been) told": "is reported, is shown; may tell: may distinguish",
    r"tells? of": "reports, describes",
    r"taken for": "treated as, mistaken for",
    r"anew": "again, restart, start over",
    r"(?:leave|leaves|left) [^.\n]{0,30}over\b(?!lap)": "leaves unused, remains",
    r"lets? go of": "releases, frees",
    r"in the way of": "prevents",
    r"as all else": "like everything else",
    r"those of our engine": "name the engine",
    r"of ours": "Meshwright's",
    r"nothing else there": "say what is printed",
    r"does not have it": "lacks it, is missing it",
    r"tokenise[sd]?|optimisations?|recognised?|synchronised?": "American spelling: -ize",
}
LEFT_OUT: set[str] = set()
# Packages whose variables and parameters have no name of `FILLERS`.
NAMED = (
    *("bench", "checkpoint", "cli", "cost", "data", "evaluate", "interop", "layout", "models"),
    *("parallel", "planner", "program", "prove", "report", "runtime", "serve", "simulate"),
    *("spec", "training"),
)
FILLER_WORDS = (
    "found one held made told more each kept own rest others at of words whole here there beside "
    "again every some mine theirs least most what who why now then both either"
)
FILLERS = frozenset(FILLER_WORDS.split())
# Tables that commands write end a page.
WRITTEN = re.compile(r"<!-- (?:measured|mutants): begin -->.*", re.DOTALL)
CODE = re.compile(r"^```.*?^```|``.*?``|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


@functools.cache
def pattern_of(phrases):
    """Return the pattern of any of some phrases, over the ends of lines as well."""
    either = "|".join(phrase.replace(" ", r"\s+") for phrase in phrases)
    return re.compile(rf"\b(?:{either})\b", re.IGNORECASE)


def hits(text, vocabulary):
    """Yield (number of the line, what is written there, its replacement)."""
    if not pattern_of(tuple(vocabulary)).search(text):
        return
    for phrase, instead in vocabulary.items():
        for found in pattern_of((phrase,)).finditer(text):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def report(path, found):
    name = path.relative_to(ROOT)
    return "\n".join(f"{name}:{line}: {said!r}; write: {instead}" for line, said, instead in found)


def blank(found):
    return "\n" * found[0].count("\n")


def test_pages():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert len(pages) > 80
    problems = []
    for path in pages:
        if str(path.relative_to(ROOT)) not in LEFT_OUT:
            text = CODE.sub(blank, WRITTEN.sub("", path.read_text(encoding="utf-8")))
            problems.append(report(path, hits(text, PAGES)))
    assert not any(problems), "\n".join(filter(None, problems))


def texts(path):
    """Yield (line, text) of docstrings and of the other strings of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_strings_of_the_source():
    files = sorted((ROOT / "src/meshwright").rglob("*.py"))
    assert len(files) > 200
    problems = [
        report(path, [(start + line - 1, said, instead)])
        for path in files
        for start, text in texts(path)
        for line, said, instead in hits(text, EVERYWHERE)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("phrase", ["Gradients are held\nagainst theirs", "a loop of one's own"])
def test_a_phrase_is_found_across_lines(phrase):
    assert list(hits(phrase, EVERYWHERE))
    assert not list(hits("compared with theirs, in your own loop", PAGES))


def fillers(source):
    """Yield (line, name) of the variables and parameters of a module that are filler words.

    Fields of classes are attributes, whose names are part of an interface.
    """
    tree = ast.parse(source)
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            names = [node.id]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            names = [node.name]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name in FILLERS)


@pytest.mark.parametrize("package", NAMED)
def test_names_say_what_a_value_is(package):
    files = sorted((ROOT / "src/meshwright" / package).rglob("*.py"))
    assert len(files) > 3
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {name!r} does not say what the value is"
        for path in files
        for line, name in fillers(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(problems)


def test_a_filler_is_found_wherever_a_name_is_given():
    source = """
class Row:
    rest: int

def load(what, *most, why=None, **more):
    found = [one for one in most]
    with open(found) as held:
        for at, (each, _) in enumerate(held):
            told = lambda whole: whole
    try:
        kept: int = (now := 1)
    except OSError as then:
        raise
    return found, others
"""
    names = sorted(name for _, name in fillers(source))
    expected = "at each found held kept more most now one then told what whole why"
    assert names == expected.split()
