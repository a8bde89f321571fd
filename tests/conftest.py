"""Fixtures that whole-run tests share, and the marks of the fault cases in the report."""

import pytest

from meshwright.spec.loading import load_config
from outcomes import Outcomes
from runs import TINY

pytest.register_assert_rewrite("faulty")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text(
        "<|endoftext|>".join(f"story {n}: the cat sat on mat {n}. " * 9 for n in range(60))
    )
    return file


@pytest.fixture
def config(corpus, tmp_path):
    def make(*overrides):
        fixed = [f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
        where = [f"log.dir={tmp_path / 'runs'}", "log.name=run"]
        return load_config(None, [*TINY, *fixed, *where, *overrides])

    return make


@pytest.fixture
def outcome(record_property):
    """Takes down what becomes of a fault."""
    return Outcomes(record_property)


@pytest.fixture
def go(config, tmp_path, outcome):
    """Return a function that trains with a fault, and says what came of it."""
    from faulty import train_with

    def run(fault, *overrides, **words):
        return train_with(config, tmp_path / "runs", outcome, fault, *overrides, **words)

    return run


@pytest.fixture
def whole(go):
    """Return the hashes of the last step's files of a run that nothing disturbs."""
    from faulty import last_files

    def run(*overrides):
        folder, _, _ = go(None, *overrides, name="whole")
        return last_files(folder)

    return run


def cases_of(item):
    """Return the numbers of the fault cases that a test is of."""
    return sorted({number for mark in item.iter_markers("case") for number in mark.args})


def pytest_collection_modifyitems(items):
    for item in items:
        if numbers := cases_of(item):
            item.user_properties.append(("cases", " ".join(map(str, numbers))))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test of a fault case that takes nothing down has not shown what it is for."""
    report = (yield).get_result()
    has_outcome = any(name == "outcome" for name, _ in item.user_properties)
    if call.when == "call" and report.passed and cases_of(item) and not has_outcome:
        report.outcome, report.longrepr = "failed", "no outcome was recorded"
