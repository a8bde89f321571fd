"""A run's page at its end, and the numbers of pages."""

import io
import math

from meshwright.report.figure import rounded, spread, thin
from meshwright.runtime import session
from meshwright.runtime.session import train
from runs import clean_environ


def test_numbers_are_short_and_finite():
    assert rounded({"a": [1.23456789, math.nan, 3.0, "x", True]}) == {
        "a": [1.2346, None, 3, "x", True]
    }
    assert thin(range(10_000), 5) == [0, 2500, 5000, 7499, 9999]
    assert spread([1.0, 1.1, 5.0], 1.0, 0.0, 6.0) == [1.0, 2.0, 5.0]
    assert spread([5.9, 6.0], 1.0, 0.0, 6.0) == [5.0, 6.0]


def test_a_run_writes_its_page_at_its_end(config):
    said = io.StringIO()
    run = train(config("layout.dp_replicate=1", "train.steps=2"), clean_environ(), said)
    assert f"report {run.folder}/report/index.html" in said.getvalue()
    assert "Done: 2 steps." in (run.folder / "report" / "index.html").read_text()


def test_a_page_that_cannot_be_written_is_a_note(config, monkeypatch):
    def refuse(paths):
        raise OSError("disk full")

    monkeypatch.setattr(session, "write_report", refuse)
    said = io.StringIO()
    job = session.prepare_job(config("layout.dp_replicate=1"), clean_environ())
    session._write_report(job, said)
    assert said.getvalue() == "note: no report was written: OSError: disk full\n"
