"""What `benchmarks.gpu_peaks` makes of a history of allocations."""

from benchmarks.gpu_peaks import Held, at_peak, line_of


def event(action, address, size, *frames):
    return {"action": action, "addr": address, "size": size, "frames": frames}


def test_what_is_held_at_the_peak_is_told_with_its_places():
    events = [
        event("alloc", 1, 10, "a"),
        event("alloc", 2, 30, "b"),
        event("free_requested", 1, 10),
        event("alloc", 3, 30, "b"),  # 70: what is freed counts until that is completed
        event("free_completed", 1, 10),
        event("free_completed", 9, 5),  # of before the history
        event("alloc", 1, 10, "a"),
    ]
    most, held = at_peak(events, lambda one: one["frames"][0])
    assert most == 70
    assert held == [Held(30, 2, "b"), Held(10, 1, "a")]


def test_a_place_is_the_innermost_line_that_is_no_library_s(tmp_path):
    own, compiled = tmp_path / "own.py", tmp_path / "torchinductor_user" / "made.py"
    compiled.parent.mkdir()
    own.write_text("first\nsecond\n")
    compiled.write_text("buf0 = empty()\n")
    library = {"filename": "/x/site-packages/torch/nn.py", "line": 1}
    mine = [{"filename": str(own), "line": line} for line in (2, 1)]
    assert line_of({"frames": [library, *mine]}) == "own.py:2 second < own.py:1 first"
    made = {"filename": str(compiled), "line": 1}
    assert line_of({"frames": [library, made, *mine]}) == "compiled: buf0 = empty()"
