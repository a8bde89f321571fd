"""The terminal view: plain lines, the live block within 80 columns, trackers."""

import io

import pytest
from rich.console import Console

from meshwright.layout import Layout
from meshwright.runtime.supervise.view import EventTail, LiveView, QuietView, View

START = {
    "event": "start",
    "steps": 100,
    "world": 2,
    "device": "CPU (some processor, 2 cores)",
    "layout": Layout(dp_replicate=2).model_dump(),
    "parameters": 4_590_000,
    "train_tokens": 9_700_000,
    "unigram_entropy": 3.1447,
}
STEP = {
    "event": "step",
    "step": 40,
    "loss": 2.5,
    "grad_norm": 0.75,
    "lr": 1e-3,
    "step_time_s": 0.5,
    "tokens_per_s": 8192.0,
    "tokens_per_s_per_device": 4096.0,
    "tflops_per_device": 0.11,
    "mfu": None,
    "peak_memory_bytes": {"0": 3 * 2**28, "1": 2**30},
    "data_time_share": 0.001,
}
END = {"event": "end", "step": 100, "loss": 1.25, "stopped": False}


def shown(view_class, *events, terminal=False):
    out = io.StringIO()
    view = view_class(Console(file=out, width=80, force_terminal=terminal, highlight=False))
    for event in events:
        view.write(event)
    view.close()
    return out.getvalue()


def test_plain_lines():
    assert shown(View, START, STEP, {**STEP, "step": 41, "mfu": 0.5}, END).splitlines() == [
        "4.59M parameters on 2 ranks of CPU (some processor, 2 cores): layout dp2 mb1; "
        "9.7M training tokens, unigram entropy 3.1447 nats",
        "step 40/100 loss 2.5000 norm 0.7500 lr 1.00e-03 8192 tok/s (4096 per device) "
        "peak 1.00 GiB eta 30.0s",
        "step 41/100 loss 2.5000 norm 0.7500 lr 1.00e-03 8192 tok/s (4096 per device) "
        "mfu 50.0% peak 1.00 GiB eta 29.5s",
        "done after 100 steps: loss 1.2500 nats, unigram entropy of the data 3.1447 nats",
    ]


def test_an_evaluation_is_told_when_it_begins():
    begins = {"event": "evaluating", "step": 40, "batches": 250}
    for view, terminal in ((View, False), (LiveView, True)):
        told = shown(view, START, STEP, begins, terminal=terminal)
        assert "step 40: evaluating on 250 batches" in told
    assert "evaluating" not in shown(QuietView, START, STEP, begins)


def test_live_block_fits_80_columns_and_says_everything():
    text = shown(LiveView, START, STEP, END, terminal=True)
    import re

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert max(len(line) for line in plain.splitlines()) <= 160  # the start line wraps softly
    block = [line for line in plain.splitlines() if "eta" in line or "grad norm" in line]
    assert block
    assert all(len(line.rstrip()) <= 80 for line in block)
    for words in ("40 of 100", "2.5000", "8,192", "4,096", "1.00 GiB (rank 1)", "eta 30.0s"):
        assert words in plain, words
    assert "MFU" not in plain  # nobody has stated the device's peak
    assert "━" in plain or "╸" in plain or "-" in plain


def test_tail_waits_for_whole_lines(tmp_path):
    file = tmp_path / "events.jsonl"
    tail = EventTail(file)
    assert list(tail.new()) == []
    file.write_text('{"event": "start"}\n{"event": "st')
    assert [e["event"] for e in tail.new()] == ["start"]
    assert list(tail.new()) == []
    with file.open("a") as more:
        more.write('ep"}\n')
    assert [e["event"] for e in tail.new()] == ["step"]


def test_a_run_that_goes_on_shows_no_history(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_text('{"event": "start"}\n{"event": "step"}\n{"event": "st')
    tail = EventTail(file, only_new=True)
    assert list(tail.new()) == []
    with file.open("a") as more:
        more.write('ep", "step": 3}\n{"event": "end"}\n')
    assert [e["event"] for e in tail.new()] == ["step", "end"]
    assert list(EventTail(tmp_path / "none", only_new=True).new()) == []


def test_the_time_left_is_told_by_the_pace_of_the_last_steps():
    times = [0.5, 0.5, 0.5, 30.0, 0.5, 0.5]  # the fourth waited for a save
    steps = [{**STEP, "step": 41 + at, "step_time_s": s} for at, s in enumerate(times)]
    lines = shown(View, START, *steps).splitlines()[1:]
    assert [line.rpartition(" ")[2] for line in lines] == [
        *("29.5s", "29.0s", "28.5s", "28.0s", "27.5s", "27.0s")
    ]
    # A run that goes on has its own pace.
    again = shown(View, START, *steps, START, {**STEP, "step_time_s": 2.0}).splitlines()[-1]
    assert again.endswith("eta 2m00s")


def test_a_quiet_view_says_what_goes_wrong_and_the_end():
    bad = {"event": "overflow", "step": 3, "tensor": "norm.weight", "loss_scale": 1.0}
    save = {"event": "save", "step": 4, "path": "x", "seconds": 1.0}
    assert shown(QuietView, START, STEP, bad, save, END).splitlines() == [
        "step 3: skipped, the gradient of norm.weight is not finite",
        "done after 100 steps: loss 1.2500 nats, unigram entropy of the data 3.1447 nats",
    ]


def test_what_happens_to_a_run_is_said():
    events = [
        {"event": "bad_checkpoint", "problem": "step-00000004/model.json is corrupt"},
        {"event": "resume", "step": 2, "path": "runs/a", "layout": "tp2 mb1", "seconds": 0.5},
        {"event": "overflow", "step": 3, "tensor": "norm.weight (rank 1)", "loss_scale": 1.0},
        {"event": "loss_spike", "step": 30, "loss": 9.5, "usual": 2.25},
        {"event": "loss_spike", "step": 31, "loss": "nan", "usual": 2.25},
    ]
    assert shown(View, *events).splitlines() == [
        "set aside: step-00000004/model.json is corrupt",
        "resuming after step 2, from runs/a, written by tp2 mb1",
        "step 3: skipped, the gradient of norm.weight (rank 1) is not finite",
        "step 30: loss 9.5000, where 2.2500 was usual",
        "step 31: loss nan, where 2.2500 was usual",
    ]


@pytest.mark.parametrize(("detect_s", "detected"), [(0.1011, "detected in 101ms; "), (None, "")])
def test_a_restart_says_when_it_was_detected_and_what_is_recomputed(detect_s, detected):
    cause = {"event": "restart", "cause": "rank 1 was killed by SIGKILL", "detect_s": detect_s}
    assert shown(View, cause | {"attempt": 1, "from_step": 2, "lost_steps": 1}).splitlines() == [
        "rank 1 was killed by SIGKILL",
        f"{detected}restarting after step 2 (attempt 1), steps to recompute: 1",
    ]


def test_shares_of_time_are_in_percent():
    slow = {"event": "slow_rank", "rank": 0, "from_step": 30, "step": 38}
    assert shown(View, slow | {"others_wait": 0.5092, "waits": 0.2195}).splitlines() == [
        "rank 0 is slow: from step 30 to 38 all others waited for 51% of the time, it for 22%"
    ]
