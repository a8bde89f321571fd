"""What pages advise, and by which names they call things."""

import json
import re

import pytest

from meshwright.program.profile import RankProfile, Span, StepProfile
from meshwright.report.record import read_run
from meshwright.report.run_page import run_page
from meshwright.report.run_words import profile_warnings, run_warnings
from meshwright.spec.words import busy
from run_folders import write_run
from test_report import PIPELINE, text_of


@pytest.mark.parametrize(("load", "slower"), [(0.1, 1.5), (9.0, 1.5), (9.0, 0.5)])
def test_a_slow_step_on_a_busy_machine_is_not_the_calibrations_fault(config, load, slower):
    """`doctor` has the same finding; a busy machine makes no step faster than predicted."""
    path = write_run(config(*PIPELINE, "layout.dp_replicate=1"), slower=slower)
    plan = json.loads((path / "plan.json").read_text())
    plan["machine"] |= {"load": load, "cores": 2}
    (path / "plan.json").write_text(json.dumps(plan))
    ((_, todo),) = [one for one in run_warnings(read_run(path)) if "predicted step time" in one[0]]
    if load > 1 and slower > 1:
        found = "9.0 on 2 cores; other processes take time from the ranks"
        assert todo == f"The load of the machine was {found}. Compare once it is idle."
        assert busy(load, 2) == found
    else:
        assert "meshwright bench device" in todo


def test_more_ranks_than_cores_are_why_a_step_is_slow(config):
    """Whatever the load: it is that of the ranks themselves."""
    path = write_run(config(*PIPELINE, "layout.dp_replicate=1"), slower=1.5)
    plan = json.loads((path / "plan.json").read_text())
    plan["machine"] |= {"load": 9.0, "cores": 1}
    (path / "plan.json").write_text(json.dumps(plan))
    ((_, todo),) = [one for one in run_warnings(read_run(path)) if "predicted step time" in one[0]]
    assert todo == "2 ranks share 1 core. Compare a layout with a core for each rank."


@pytest.mark.parametrize(
    ("cause", "layout", "advice"),
    [
        ("data", {"zero": 0}, "A larger train.batch."),
        ("data", {"zero": 3}, "A larger train.batch, or a smaller layout.zero where memory"),
        ("tp", {"sp": True}, "A smaller layout.tp."),
        ("tp", {"sp": False}, "A smaller layout.tp, or layout.sp=true."),
    ],
)
def test_nobody_is_advised_to_do_what_is_done(cause, layout, advice):
    rank = RankProfile(0, {}, (), causes={"compute": 1.0, cause: 1.0})
    one = StepProfile("measured", layout, "", "", (rank,))
    ((said, todo),) = profile_warnings(None, one)
    assert "takes 50% of the step" in said
    assert todo.startswith(advice)


@pytest.mark.parametrize(
    ("layout", "proposed"),
    [
        ({"schedule": "1f1b"}, {"microbatches", "virtual", "zero-bubble"}),
        ({"schedule": "interleaved_1f1b", "virtual_stages": 2}, {"microbatches", "zero-bubble"}),
        ({"schedule": "zbv", "virtual_stages": 2}, {"microbatches"}),
    ],
)
def test_an_idle_pipeline_is_not_advised_what_it_has(layout, proposed):
    """`virtual stages` was proposed to runs that had them."""
    spans = [Span("compute", "F", 0.0, 1.0, 0, 0), Span("compute", "F", 2.0, 3.0, 0, 1)]
    ranks = tuple(RankProfile(place, {"pp": place}, (place,), tuple(spans)) for place in (0, 1))
    one = StepProfile("measured", {"pp": 2, **layout}, "", "", ranks)
    ((said, todo),) = profile_warnings(None, one)
    assert "The pipeline is idle for 33%" in said
    assert {word for word in ("microbatches", "virtual", "zero-bubble") if word in todo} == proposed


def test_the_two_peaks_have_a_name_each(config):
    """Tensors in one place and a process in another were both the peak memory."""
    page = run_page(read_run(write_run(config(*PIPELINE, "layout.dp_replicate=1"))))
    text = text_of(page)
    assert "Process peak 400.00 MiB rank 1, the whole process" in text
    assert re.search(r"Tensor peak [\d.]+ MiB rank \d, tensors alone", text)
    assert re.search(r"tensor peak [\d.]+ MiB, measured", text)
    assert "peak memory" not in text.lower()
