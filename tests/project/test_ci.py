"""What CI runs: turns and draws by the commit, parts with a limit, and skips that are failures."""

import ast
import math
import re
from pathlib import Path
from random import Random

import pytest
import yaml
from ci.__main__ import SOFT
from ci.extras import CONSTRAINTS, EXTRAS
from ci.parts import DRAWN, SLOW_SHARES, everything, of_commit
from ci.turns import head, order_of, seed_of

from meshwright.cli import main
from meshwright.prove.matrix import drawn, matrix

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
# So many commits in a row leave nothing out, in all but one case of a thousand.
COMMITS = 60


def commits(seed, number=COMMITS):
    draw = Random(seed)
    return [f"{draw.getrandbits(160):040x}" for _ in range(number)]


# --- turns and draws --------------------------------------------------------------------------


def test_a_commit_has_the_same_parts_each_time_and_another_has_others():
    one, other = commits(1, 2)
    assert of_commit(one) == of_commit(one)
    assert of_commit(one) != of_commit(other)
    assert [p.name for p in everything(one)] == [p.name for p in everything(other)]
    assert head(ROOT) == head(ROOT)
    assert len(head(ROOT)) == 40


def test_orders_are_fair_and_independent():
    hashes = commits(2, 3000)
    for purpose in ("a", "b"):
        firsts = [order_of(one, purpose, "wxyz")[0] for one in hashes]
        for choice in "wxyz":  # 750, with a deviation of 24
            assert 640 < firsts.count(choice) < 860
    same = sum(order_of(one, "a", "wxyz")[0] == order_of(one, "b", "wxyz")[0] for one in hashes)
    assert 640 < same < 860
    assert len({seed_of(one, "random") for one in hashes}) > 2990


@pytest.mark.slow
def test_a_few_commits_have_every_group_and_every_share():
    missed = 0
    for trial in range(100):
        every = [p for one in commits(100 + trial, 360) for p in of_commit(one)]
        parts = [p for p in every if p.is_required]  # on a slow machine there are no others
        groups = {p.name for p in parts if p.name.startswith("extras-")}
        shares = {p.why for p in parts if p.name == "slow"}
        missed += len(groups) < len(EXTRAS) or len(shares) < SLOW_SHARES
    assert missed <= 1


def test_a_commit_always_has_the_hard_promises():
    for one in commits(3):
        parts = {p.name: p for p in of_commit(one)}
        fixed = {"setup", "lint", "types", "test", "faults", "slow", "random"}
        fixed |= {"processors", "flakes"}
        fixed |= {f"matrix-{world}" for world in (2, 4, 8, 16)}
        assert all(parts[name].is_required for name in fixed)
        assert sum(name.startswith("extras-") and p.is_required for name, p in parts.items()) == 1
        assert sum(p.minutes for p in parts.values() if p.is_required) <= SOFT
        assert [name for name, p in parts.items() if p.between] == [
            *("matrix-2", "random", "flakes")
        ]
        assert "--draw" not in parts["matrix-2"].command
        assert str(seed_of(one, "matrix-8")) in parts["matrix-8"].command
        assert str(seed_of(one, "matrix-2")) in parts["matrix-2"].command


def test_everything_has_no_draw_and_no_turn():
    parts = {p.name: p for p in everything("0" * 40)}
    assert {f"extras-{name}" for name in EXTRAS} <= set(parts)
    for name, one in parts.items():
        assert one.is_required
        assert "--share" not in one.command
        assert "--minutes" not in one.command
        assert ("--draw" not in one.command) or name in ("random", "flakes")
    assert set(parts) >= {p.name for one in commits(4) for p in of_commit(one)}


@pytest.mark.parametrize("world", [4, 8])
def test_a_draw_from_the_table_is_its_seeds_and_many_have_all(world):
    cases = [case for case in matrix(world) if case.refused is None]
    number = DRAWN[world]
    assert drawn(cases, number, 5) == drawn(cases, number, 5) != drawn(cases, number, 6)
    place = {id(case): at for at, case in enumerate(cases)}
    for seed in range(40):
        assert len({place[id(case)] for case in drawn(cases, number, seed)}) == number
    # A layout is left out by so many draws with a chance of one in 10,000 each.
    draws = math.ceil(math.log(1e-4) / math.log(1 - number / len(cases)))
    met = {place[id(case)] for seed in range(draws) for case in drawn(cases, number, seed)}
    assert len(met) >= len(cases) - 1


def test_the_command_draws_from_the_table(capsys):
    words = ["prove", "--matrix", "--world", "4", "--check-order", "--draw", "3", "--seed", "7"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "3 layouts of 4 ranks, 35 to be refused" in said
    cases = [case for case in matrix(4) if case.refused is None]
    assert all(case.label in said for case in drawn(cases, 3, 7))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--draw", "3"], "--draw needs --matrix"),
        (["--random", "2", "--draw", "3"], "--draw needs --matrix"),
        (["--matrix", "--world", "16", "--draw", "0"], "nearest legal: 1"),
        (["--matrix", "--world", "2", "--draw", "900"], "900 layouts of a table of"),
    ],
)
def test_draws_that_cannot_be_are_refused(words, told, capsys):
    assert main(["prove", *words]) == 2
    assert told in capsys.readouterr().err


# --- a skip is a failure ----------------------------------------------------------------------

SKIPPING = """
import pytest
def test_good(): pass
def test_body(): pytest.skip("needs a GPU")
@pytest.mark.skipif(True, reason="by mark")
def test_mark(): pass
@pytest.fixture
def thing(): pytest.skip("by fixture")
def test_fixture(thing): pass
def test_package(): pytest.importorskip("no_such_package")
@pytest.mark.xfail(reason="known", strict=True)
def test_expected(): assert False
"""


@pytest.fixture
def says(pytester):
    """Return a function that runs pytest with the plugin on some text, and returns its outcomes."""

    def run(text, *words):
        pytester.makepyfile(text)
        options = ["-p", "ci.plugin", "-p", "no:cacheprovider", "-rA", *words]
        done = pytester.runpytest_inprocess(*options)
        return int(done.ret), done.parseoutcomes() if done.outlines else {}, done.stdout.str()

    return run


def test_a_skip_of_any_kind_is_a_failure_where_it_is_asked_for(says):
    code, found, _ = says(SKIPPING)
    assert (code, found) == (0, {"passed": 1, "skipped": 4, "xfailed": 1})
    code, found, said = says(SKIPPING, "--no-skips")
    assert code == 1
    assert found.pop("failed") + found.pop("errors") == 4
    assert found == {"passed": 1, "xfailed": 1}
    for reason in ("needs a GPU", "by mark", "by fixture", "no_such_package"):
        assert re.search(rf"was skipped where it may not be.*{reason}", said)
    code, found, _ = says(SKIPPING, "--no-skips", "--may-skip=GPU", "--may-skip=::test_fixture")
    assert (code, found["skipped"]) == (1, 2)
    assert says(SKIPPING, "--no-skips", "--may-skip=kind_is_a_failure")[0] == 0


def test_a_file_that_is_skipped_while_it_is_read_is_a_failure(says):
    text = "import pytest\npytest.importorskip('no_such')\ndef test_good(): pass\n"
    assert says(text)[1] == {"skipped": 1}
    code, found, said = says(text, "--no-skips")
    assert code not in (0, 5)
    assert found == {"errors": 1}
    assert "no_such" in said


def test_shares_are_apart_and_make_the_whole(says):
    text = "".join(f"def test_{name}(): pass\n" for name in "abcdefg") + "def other(): pass\n"
    found = []
    for number in (1, 2, 3):
        code, _, said = says(text, "--share", f"{number}/3")
        assert code == 0
        found += re.findall(r"^PASSED .*::test_(\w)", said, re.MULTILINE)
    assert sorted(found) == list("abcdefg")
    assert says(text, "--share", "4/3")[0] == 4


# --- the tests of one room ---------------------------------------------------------------------


def test_every_room_of_code_has_a_folder_of_tests():
    rooms = {file.parent.name for file in (ROOT / "src" / "meshwright").glob("*/__init__.py")}
    folders = {file.parent.name for file in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == rooms | {"project"}
    assert not list((ROOT / "tests").glob("test_*.py"))


# --- the groups of extras ---------------------------------------------------------------------


def packages_that_tests_may_miss():
    """Yield a file and what it asks for by `importorskip`."""
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source if "importorskip" in source else "")):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
                assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}"
                yield path, node.args[0].value.partition(".")[0]


def test_every_package_that_tests_may_miss_is_installed_by_ci():
    """With the others for the development, or by a group whose tests the file belongs to."""
    always = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").open()}
    of_group = {ROOT / test: name for name, one in EXTRAS.items() for test in one.tests}
    modules = {"megatron": "megatron-core", "sky": "skypilot", "kubeflow": "kubeflow-training"}
    modules |= {"mlflow": "mlflow-skinny", "PIL": "pillow"}
    seen = set()
    for path, module in packages_that_tests_may_miss():
        if path == Path(__file__) or module in always:
            continue
        name = of_group.get(path)
        assert name, f"{path.name} asks for {module}, which no group of ci/extras.py installs"
        pins = (CONSTRAINTS / f"{name}.txt").read_text().lower().replace("_", "-")
        assert f"{modules.get(module, module).replace('_', '-')}==" in pins, (path, module)
        seen.add(name)
    assert {"deepspeed", "torchao", "lm-eval", "schemas"} <= seen


@pytest.mark.parametrize("name", EXTRAS)
def test_a_group_has_its_tests_and_its_pins(name):
    extra = EXTRAS[name]
    assert all((ROOT / test).is_file() for test in extra.tests)
    pins = CONSTRAINTS / f"{name}.txt"
    assert pins.is_file() == bool(extra.requirements)
    assert extra.requirements or extra.debian
    if extra.requirements:
        lines = pins.read_text().splitlines()
        assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", line) for line in lines)
        assert not any(line.startswith(("torch==", "meshwright==")) for line in lines)


def test_the_workflow_runs_the_same_scripts():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    run = {name: [step.get("run") for step in job["steps"]] for name, job in jobs.items()}
    assert "bash .ci/run" in run["commit"]
    # The night's parts are distributed over two jobs, since one may take six hours.
    left, taken = (
        words.partition('PARTS="')[2].rstrip('"').split()
        for job in ("nightly", "processors")
        for words in run[job]
        if words and words.startswith("make everything")
    )
    assert (left[0], taken[0]) == ("--without", "--only")
    assert set(left[1:]) == set(taken[1:]) - {"setup"}
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make ci"
