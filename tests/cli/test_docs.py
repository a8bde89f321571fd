"""The docs are run: commands, Python snippets, links, Makefile targets, config keys."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.fault_cases import CASES

from meshwright.cli import main
from meshwright.cli.common import read_config
from meshwright.layout import resolve_layout
from meshwright.runtime.machines.machine import detect
from meshwright.spec.loading import KEYS

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
TINY = [
    *("model.dim=32", "model.n_layers=1", "model.n_heads=4", "model.n_kv_heads=4"),
    *("train.steps=2", "train.batch=4", "train.seq_len=32", "train.eval_every=0"),
    *("data.source=corpus", "data.cache=cache", "cluster.device=cpu", "checkpoint.every=0"),
]
ONE_RANK = "layout.dp_replicate=1"
# Pages whose commands take seconds; other tests hold these commands.
LONG = (
    *("bench.md", "plan.md", "plans.md", "prove.md", "report.md", "simulate.md", "train.md"),
    *("out-of-memory.md", "long-context.md", "clean.md", "eval.md", "from-deepspeed.md"),
    *("one-to-many.md", "resume.md", "choose-a-layout.md", "layouts.md", "tutorial.md"),
    *("fine-tune.md", "doctor.md"),
)
NETWORK = ("tinystories", "hf:", "stories", "lambada", "s3:", "checkpoint.dir=s3:")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page):
    """Yield (words, exit code) of every command of a page."""
    for block in blocks(page, "(?:bash|console)"):
        for line in block.splitlines():
            line = line.removeprefix("$ ")
            code = re.search(r"# exit code (\d)", line)
            yield shlex.split(line, comments=True), int(code[1]) if code else 0


def ids(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the files that the docs speak of."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.toml").write_text(blocks(README, "toml")[0])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for n in range(20):
        (corpus / f"{n}.txt").write_text(f"def f{n}(x):\n    return x + {n}\n" * 40)
    rows = (json.dumps({"text": f"def g{n}(): pass"}) for n in range(50))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/my_task.yaml").write_text(blocks(ROOT / "docs/commands/eval.md", "yaml")[0])
    question = {"question": "def", "choices": [" f", " g"], "answer": 0}
    (tmp_path / "questions.jsonl").write_text(3 * f"{json.dumps(question)}\n")
    return tmp_path


CHAT = ["data.source=examples/chat/conversations.jsonl", "train.seq_len=256"]


def overridden(words):
    """Return the words of `train` with tiny sizes; what the docs name stays otherwise."""
    return [*words, *TINY, ONE_RANK, *(CHAT if "examples/chat.toml" in words else [])]


def by_length(page):
    marks = [pytest.mark.slow] if page.name in LONG else []
    return pytest.param(page, marks=marks)


@pytest.mark.timeout(600)  # a page may prove, train and resume
@pytest.mark.parametrize(
    "page", [by_length(page) for page in PAGES if any(commands(page))], ids=ids
)
def test_commands(page, workplace, capsys):
    has_run, steps = False, 2
    for words, code in commands(page):
        if words[:1] != ["meshwright"]:
            continue
        command, rest = words[1], words[2:]
        if any(word.startswith(NETWORK) for word in rest):
            continue
        if "--tasks" in rest and importlib.util.find_spec("lm_eval") is None:
            continue
        if command == "train" and "--resume" in rest:
            assert has_run, "a run to go on with comes first"
            # Further than the tiny run and the one before, not as far as the page says
            steps += 1
            words = [
                *(w for w in words if not w.startswith("train.steps=")),
                f"train.steps={steps}",
            ]
        elif command == "train" and "--plan" in rest:
            # What the program is made of has to stay as it was planned
            words, has_run = [*words, "train.steps=2", *TINY[-5:]], True
        elif command == "train" and code == 0:
            pairs = zip(["", *rest], rest, strict=False)
            files = [w for last, w in pairs if last != "--deepspeed" and not w.startswith("--")]
            config = read_config(SimpleNamespace(words=files))
            resolve_layout(config, detect(config.cluster, os.environ))
            if page == README:  # each of its layouts
                words, has_run = [*words, *TINY, "model.n_layers=4"], True
            elif has_run or (page.parent.name == "commands" and page.name != "train.md"):
                continue  # one run a page is enough
            else:
                words, has_run = overridden(words), True
        of_a_run = command in ("generate", "eval", "checkpoint", "clean") or rest[:1] == [
            "runs/latest"
        ]
        if of_a_run and code == 0 and not has_run:
            assert main(overridden(["train", "run.toml"])) == 0
            has_run = True
        if command == "generate":
            words = [*words, "--max-tokens", "8"]
        if command == "prove" and page == README:
            words = [*words, "train.batch=4", "train.seq_len=32"]  # fewer microbatches and blocks
        if command == "doctor" and rest[:1] == ["run.toml"]:
            words = [*words, *TINY]
        assert main(words[1:]) == code, f"{ids(page)}: {' '.join(words)}"
        shown = capsys.readouterr()
        assert shown.err if code else shown.out
        if code == 2:
            is_told = shown.err.startswith(f"meshwright {command}: ")
            assert is_told or "contradictory!" in shown.err, shown.err
        if command == "train" and code == 0:
            assert_trained(workplace / "runs/latest", words)
    if page == README:
        check_losses(workplace / "runs")


def check_losses(runs):
    """Every layout that the README trains computes the same losses, as it says."""
    latest = (runs / "latest").resolve()  # went on with another of them
    found = []
    for folder in sorted(set(runs.iterdir()) - {runs / "latest", latest}):
        events = map(json.loads, (folder / "events.jsonl").open())
        found.append([event["loss"] for event in events if event["event"] == "step"])
    assert [len(losses) for losses in found] == [2, 2, 2]
    assert found[1:] == [pytest.approx(found[0], abs=2e-5)] * 2


def assert_trained(run, words):
    """A run came to the last step that it was asked for, and its losses are those of a model."""
    found = list(map(json.loads, (run / "events.jsonl").read_text().splitlines()))
    steps = int([word for word in words if word.startswith("train.steps=")][-1].partition("=")[2])
    assert (found[-1]["event"], found[-1]["step"]) == ("end", steps)
    losses = [event["loss"] for event in found if event["event"] == "step"]
    assert all(1 < loss < 7 for loss in losses), losses
    return losses


@pytest.mark.slow
def test_torchrun_line(workplace):
    lines = [words for page in PAGES for words, _ in commands(page) if words[:1] == ["torchrun"]]
    assert lines
    assert all(words == lines[0] for words in lines)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run(
        [*torchrun, *lines[0][1:], *TINY], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "done after 2 steps" in done.stdout


SNIPPET = """\
import meshwright
load = meshwright.load_config
meshwright.load_config = lambda path=None, overrides=(): load(path, [*overrides, *{tiny}])
{code}
assert len({losses}) == 2
"""


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=ids)
def test_python_snippets(page, workplace, forks):
    if page.name == "run-folder.md":
        assert main(overridden(["train", "run.toml"])) == 0
    for code in blocks(page, "python"):
        losses = "losses" if "train(" in code else "'no'"  # others only have to run
        snippet = SNIPPET.format(tiny=[*TINY, ONE_RANK], code=code, losses=losses)
        with forks.all_python():
            done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        assert (page.parent / path).exists(), f"{ids(page)} links to {target}"
        if anchor and not path:
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_of_the_source_are_where_a_page_says(page):
    folders = [ROOT, ROOT / "src", ROOT / "src/meshwright", ROOT / "tests"]
    for named in re.findall(r"`([\w./-]+/[\w-]+\.py)`", page.read_text()):
        assert any((one / named).exists() for one in folders), f"{ids(page)} names {named}"


def test_the_dockerfile_takes_what_is_there():
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert copied
    assert all((ROOT / file).exists() for line in copied for file in line.split())


def test_make_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for page in PAGES for t in re.findall(r"[`\n]make ([\w-]+)", page.read_text())}
    assert {"demo", "test"} <= named <= targets


def test_every_config_key_is_documented():
    rows = set(re.findall(r"^\| `(\w+\.\w+)` \|", (ROOT / "docs/config.md").read_text(), re.M))
    assert rows == {f"{name}.{key}" for name, some in KEYS.items() for key in some}


def test_every_module_is_on_the_tour():
    tour = (ROOT / "docs/tour.md").read_text()
    for path in sorted((ROOT / "src/meshwright").rglob("*.py")):
        assert path.name.startswith("__") or f"`{path.name}`" in tour, path.name


def test_every_fault_case_has_a_test_and_a_measured_row():
    """The marks are read from the sources: those of tests that are left out count, too."""
    marked = set()
    for path in (ROOT / "tests").glob("*/test_*.py"):
        for numbers in re.findall(r"mark\.case\(([\d, ]+)\)", path.read_text()):
            marked |= set(map(int, numbers.split(",")))
    assert marked == set(CASES)
    page = (ROOT / "docs/records/fault-cases.md").read_text()
    told, _, measured = page.partition("<!-- measured: begin -->")
    row = re.compile(r"^\| ([\d, ]+) \| ", re.MULTILINE)
    assert {int(n) for found in row.findall(told) for n in found.split(",")} == marked
    assert {int(n) for n in row.findall(measured)} == marked
    for line in measured.splitlines():
        assert "(failure" not in line
        assert "(error" not in line
    # What the page calls a test is one.
    names = {path.stem for path in (ROOT / "tests").glob("*/test_*.py")}
    assert set(re.findall(r"`(test_\w+)`", told)) <= names


def test_readme_is_short():
    assert README.read_text().count("\n") <= 120
