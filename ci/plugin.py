"""Options of pytest for CI: a skip that is a failure, a share of the tests.

python -m pytest -p ci.plugin --no-skips tests/comm
python -m pytest -p ci.plugin --no-skips --may-skip "needs a GPU" --may-skip tests/comm
python -m pytest -p ci.plugin --share 2/3 -m slow
"""

from __future__ import annotations

import argparse
from typing import Any

import pytest


def share(text: str) -> tuple[int, int]:
    """Read "2/3" as (2, 3). Raises `ArgumentTypeError` unless it is K/N with 1 <= K <= N."""
    number, _, total = text.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return int(number), int(total)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("ci", "what CI asks for")
    group.addoption("--no-skips", action="store_true", help="a test that is skipped has failed")
    group.addoption(
        "--may-skip",
        action="append",
        default=[],
        metavar="TEXT",
        help="but not one whose file or reason contains this",
    )
    group.addoption(
        "--share", type=share, metavar="K/N", help="of the tests chosen, the K-th of every N"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the share that was asked for, after `-m` and `-k` have chosen."""
    asked = config.getoption("share")
    if asked is None:
        return
    number, total = asked
    left_out = [item for place, item in enumerate(items) if place % total != number - 1]
    items[:] = items[number - 1 :: total]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Fail a test that is skipped, by its body, a fixture or a mark."""
    report = (yield).get_result()
    if not hasattr(report, "wasxfail"):
        _refuse(item.config, report)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Fail a file that is skipped as a whole while it is imported."""
    _refuse(collector.config, (yield).get_result())


def _refuse(config: pytest.Config, report: Any) -> None:
    if not (report.skipped and config.getoption("no_skips")):
        return
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(text in f"{report.nodeid} {why}" for text in config.getoption("may_skip")):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped where it may not be. {why}"
