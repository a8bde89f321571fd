"""The mutants: that each still fits its file, and that the harness tells who was caught."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.mutants.__main__ import BEGIN, END, Row, page, put_table, told_by
from benchmarks.mutants.killing import Answer
from benchmarks.mutants.table import SRC, Mutant, Table, TableError, copy_of_source, put_into

ROOT = Path(__file__).parents[2]
# One that is caught, one that changes nothing, one that cannot run.
PROVE = "prove layout.pp=2 layout.microbatch=4 train.batch=8 cluster.devices_per_node=2"
SMALL = f"""
[killers]
order = "{PROVE}"
[[mutant]]
name = "swapped"
file = "parallel/pipeline.py"
find = "self.microbatches[index])"
put = "self.microbatches[index - (stage > 0)])"
what = "The last stage takes the targets of another microbatch"
killers = ["order"]
[[mutant]]
name = "harmless"
file = "parallel/pipeline.py"
after = "def run"
find = "_wait(departures)"
put = "_wait( departures)"
what = "Nothing"
killers = ["order"]
[[mutant]]
name = "broken"
file = "parallel/pipeline.py"
find = "out = self.stages.forward("
put = "out = self.stages.forwards("
what = "A name that is none"
killers = ["order"]
"""


@pytest.fixture(scope="module")
def table():
    return Table.read()


def test_every_mutant_fits_its_file(table):
    assert len(table.mutants) >= 60
    for mutant in table.mutants.values():
        mutant.applied((SRC / "meshwright" / mutant.file).read_text(encoding="utf-8"))


def test_every_killer_is_used_and_says_how_many_ranks_it_has(table):
    used = {name for mutant in table.mutants.values() for name in mutant.killers}
    assert used == set(table.killers)
    for command in table.killers.values():
        # Left out, a config's layout would be that of so many cores as the machine has.
        own = command.startswith(("pytest ", "prove --matrix "))
        assert own or "cluster.devices_per_node=" in command


def test_what_is_no_mutant_is_refused_by_name(table, tmp_path):
    some = next(iter(table.mutants.values()))
    text = (SRC / "meshwright" / some.file).read_text(encoding="utf-8")
    for wrong in (
        {"find": "this line has gone"},
        {"find": "self"},  # of which there are many
        {"put": some.find},
        {"put": some.find + " ("},
        {"after": "this line has gone"},
    ):
        with pytest.raises(TableError, match=f"mutant {some.name}: "):
            replace(some, **wrong).applied(text)
    with pytest.raises(TableError, match=r"there is no parallel/gone\.py"):
        put_into(replace(some, file="parallel/gone.py"), tmp_path)
    path = tmp_path / "table.toml"
    path.write_text('[[mutant]]\nname = "half"\nfile = "errors.py"\n')
    with pytest.raises(TableError, match="mutant half: "):
        Table.read(path)


def test_a_mutant_is_put_into_a_copy(tmp_path):
    mutant = Mutant("other", "errors.py", "EXIT_REFUSED = 2", "EXIT_REFUSED = 9", "", ["none"])
    before = (SRC / "meshwright/errors.py").read_text()
    put_into(mutant, copy_of_source(tmp_path / "tree"))
    assert (tmp_path / "tree/meshwright/errors.py").read_text() == mutant.applied(before)
    assert (SRC / "meshwright/errors.py").read_text() == before


def test_a_run_of_some_mutants_replaces_their_rows_alone(table, tmp_path):
    path, (first, second, *_) = tmp_path / "page.md", table.mutants.values()
    path.write_text(f"Top\n{BEGIN}\nold\n{END}\nBottom\n")

    def run(mutant, *claims, seconds=1.0):
        answer = Answer(claims, "", seconds)
        put_table(path, table, [Row(mutant, mutant.killers[0], answer)])
        return told_by(path.read_text())

    run(second, "loss: 1 | 2")
    run(first, seconds=2.0)
    found = run(first, "other", seconds=3.0)
    assert found[first.name, first.killers[0]] == ("other", "3.0")
    assert found[second.name, second.killers[0]] == ("loss: 1 \\| 2", "1.0")
    text = path.read_text()
    assert text.startswith(f"Top\n{BEGIN}\n| mutant")
    assert text.endswith(f"{END}\nBottom\n")
    assert text.index(f"| {first.name} |") < text.index(f"| {second.name} |")
    assert "old" not in text
    # What is no longer in the table leaves the page.
    put_table(path, replace(table, mutants={second.name: second}), [])
    assert f"| {first.name} |" not in path.read_text()


def test_the_page_has_a_row_of_each_mutant(table):
    """Else: python -m benchmarks.mutants --only NAME --page docs/records/mutants.md."""
    text = (ROOT / "docs/records/mutants.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(BEGIN)
    body, _, _ = rest.partition(END)
    found = told_by(body)
    wanted = {(one.name, killer) for one in table.mutants.values() for killer in one.killers}
    assert wanted - found.keys() == set()
    assert body.strip() == page(table, found).strip()


def mutants(*words):
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    command = [sys.executable, "-m", "benchmarks.mutants", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=570, check=False
    )


@pytest.mark.slow  # CI draws mutants each time
@pytest.mark.timeout(600)
def test_the_harness_tells_who_was_caught(tmp_path):
    path, page = tmp_path / "table.toml", tmp_path / "page.md"
    path.write_text(SMALL)
    page.write_text("Top\n<!-- mutants: begin -->\nold\n<!-- mutants: end -->\n")
    done = mutants("--table", path, "--page", page)
    assert done.returncode == 1, done.stderr
    said = done.stdout
    assert "1 of 3 mutants were caught" in said
    assert "caught   swapped by order: loss: " in said
    assert "NOT CAUGHT harmless by order: Nothing\n" in said
    assert "NOT CAUGHT broken by order: A name that is none (runs on its ranks: " in said
    assert "no attribute 'forwards'" in said
    shown = page.read_text()
    assert "| swapped |" in shown
    assert "old" not in shown
    assert shown.count("**survived**") == 2
