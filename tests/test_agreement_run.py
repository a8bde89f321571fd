"""Real runs of four stages: what was recorded of them went as planned.

Order alone: four ranks share the cores of a small machine with each other and with other tests, so
that idle time is held against the plan where they sleep, see `test_agreement.py`.
"""

import io
import json

import pytest

from meshwright.launch.session import train
from meshwright.program.ledger import from_json, of_source
from meshwright.report.agreement import agreement
from meshwright.report.trace import chrome_trace
from meshwright.spec.loading import load_config
from runs import TINY, clean_environ


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)]
)
def test_four_ranks_do_their_actions_in_the_planned_order(tmp_path, monkeypatch, schedule, virtual):
    monkeypatch.chdir(tmp_path)
    words = [
        *(*TINY, "model.n_layers=8", "train.batch=8", "log.trace_memory=false"),
        *("layout.pp=4", "layout.microbatch=1", f"layout.schedule={schedule}"),
        f"layout.virtual_stages={virtual}",
    ]
    run = train(load_config(None, words), clean_environ(), io.StringIO())
    ledgers = from_json(json.loads((run.folder / "ledger.json").read_text()))
    planned, measured = of_source(ledgers, "predicted"), of_source(ledgers, "measured")
    found = agreement(planned, measured)
    assert found.difference is None
    assert 0 < found.measured < 1
    assert len(measured.ranks) == 4
    events = [event for event in chrome_trace(ledgers)["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(len(one.spans) for each in ledgers for one in each.ranks)
