"""Real runs of four stages: what was recorded of them went as planned.

Order alone: four ranks share the cores of a small machine with each other and with other tests, so
that idle time is held against the plan where they sleep, see `test_agreement.py`.
"""

import io
import json
from itertools import pairwise

import pytest

from meshwright.program.profile import from_json, of_source
from meshwright.report.agreement import agreement
from meshwright.report.trace import chrome_trace
from meshwright.runtime.session import train
from meshwright.spec.loading import load_config
from paced import idle
from runs import TINY, clean_environ


def came_in_time(measured):
    """What a stage takes in was made before, by the clock that the ranks of a machine share."""
    ended = {
        (span.name, span.stage, span.microbatch): span.end
        for one in measured.ranks
        for span in one.spans
        if span.track == "compute"
    }
    last = max(stage for _, stage, _ in ended)
    for one in measured.ranks:
        work = sorted((s for s in one.spans if s.track == "compute"), key=lambda span: span.start)
        for before, after in pairwise(work):  # a rank does one thing at a time
            assert before.end <= after.start + 1e-6
        for span in work:
            name, stage, index, end = span.name, span.stage, span.microbatch, span.end
            if name == "F" and stage > 0:
                assert ended["F", stage - 1, index] < end
            if name in ("B", "I"):
                assert ended["F", last, index] < end
                later = ended.get(("B", stage + 1, index)) or ended.get(("I", stage + 1, index))
                assert stage == last or later < end


@pytest.mark.slow
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
    profiles = from_json(json.loads((run.folder / "ledger.json").read_text()))
    planned, measured = of_source(profiles, "predicted"), of_source(profiles, "measured")
    found = agreement(planned, measured)
    assert found.difference is None
    assert [one.rank for one in measured.ranks] == [0, 1, 2, 3]
    assert found.measured == pytest.approx(idle(measured.ranks))
    came_in_time(measured)
    events = [event for event in chrome_trace(profiles)["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(len(one.spans) for each in profiles for one in each.ranks)
