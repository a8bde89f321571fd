"""What a rank's device has not come to stays open in its flight recorder, and a hang names it."""

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.flight_recorder_file import read_flight_recorder
from meshwright.runtime.supervise.explain import Witness, explain


class Device:
    """A device that comes to as many of its marks as it is told."""

    def __init__(self):
        self.made, self.done = 0, 0

    def mark(self):
        self.made += 1
        at = self.made
        return lambda: self.done >= at


def on_device(path, rank, clock):
    recorder = FlightRecorder.open(path, rank, 2, clock=clock)
    recorder.group("tp", [0, 1], "tp")
    device = Device()
    recorder.mark = device.mark
    return recorder, device


def issue(recorder, count):
    """Hand over collectives, as the host does: it ends each as soon as the device has it."""
    for _ in range(count):
        recorder.end(recorder.begin("all_reduce", 0, 64, waits=True))


def test_a_hang_names_the_first_collective_that_the_device_has_not_come_to(tmp_path):
    now = [1.0]
    seen = []
    for rank, (issued, done) in enumerate([(5, 2), (2, 2)]):
        path = tmp_path / f"{rank}"
        recorder, device = on_device(path, rank, lambda: now[0])
        recorder.step(7)
        issue(recorder, issued)
        device.done = done
        recorder.look()
        seen.append(Witness(rank, read_flight_recorder(path), "sleeping"))
    first, second = (one.reading.records for one in seen)
    assert [record.ended > 0 for record in first] == [True, True, False, False, False]
    assert all(record.ended for record in second)
    told = explain(seen, 9.0)
    assert "rank 0 waits in all_reduce #3 of tp (64 bytes), which rank 1 has not begun" in told
    assert "rank 1 is silent for 8.0s in step 7" in told


def test_looking_is_no_work_of_the_rank(tmp_path):
    recorder, device = on_device(tmp_path / "0", 0, lambda: 1.0)
    issue(recorder, 3)
    moves = read_flight_recorder(tmp_path / "0").moves
    device.done = 3
    recorder.look()
    found = read_flight_recorder(tmp_path / "0")
    assert found.moves == moves  # else a rank that hangs would seem to move
    assert found.waited_s == 0  # nor has the host waited
    assert all(record.ended for record in found.records)


def test_what_the_device_has_is_not_waited_for_again(tmp_path):
    recorder, _ = on_device(tmp_path / "0", 0, lambda: 1.0)
    issue(recorder, 1)
    assert recorder.left_open() == ()
    recorder.begin("all_gather", 0, 64)
    assert len(recorder.left_open()) == 1
