"""Steps in an object store: whole or absent, whatever the store, a rank or another process does."""

import contextlib
import json
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

import meshwright.checkpoint.ranged as ranged
import meshwright.store as store_module
from meshwright.checkpoint.commit import (
    LOCK,
    MANIFEST,
    begin,
    claim,
    clean,
    is_there,
    manifest_text,
    point,
    prune,
    read_manifest,
    seal,
    set_aside,
    step_name,
    steps,
    verify,
)
from meshwright.checkpoint.inspect import inspect
from meshwright.checkpoint.ranged import ReadAhead
from meshwright.checkpoint.restore import newest_good, stored_of
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import WEIGHTS, Chunks
from meshwright.checkpoint.tensors import Chunk, Stored, write_chunks
from meshwright.comm.world import World
from meshwright.errors import CheckpointError, ConfigError
from meshwright.spec.stored import BEST, best_step
from meshwright.store import ByteRange, StoreError, StorePath, place

ALONE = World(0, 1, torch.device("cpu"), None)
MATRIX = torch.arange(24.0).view(6, 4)


class Killed(BaseException):
    """Stands for the end of a process: nothing catches it."""


class FaultyStore(MemoryFileSystem):
    """Memory in place of a store, in which the requests of a plan fail.

    `faults` has, by the number of the request that changes something, what it raises: before it
    has done anything, or `after` it has. A killed process makes no further request.
    """

    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    cachable = False
    requests: ClassVar = []
    faults: ClassVar = {}
    after = False
    unreachable = ""  # a part of the names of objects that are not answered for
    reads: ClassVar = []  # of contents: the object's path and the bytes

    def _request(self, kind, path, act):
        cls = type(self)
        number = len(cls.requests)
        cls.requests.append((kind, path))
        fault = cls.faults.get(number)
        if fault is not None and not cls.after:
            raise fault
        result = act()
        if fault is not None:
            raise fault
        return result

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        return self._request(
            "put", path, lambda: super(FaultyStore, self).pipe_file(path, value, mode)
        )

    def rm(self, path, recursive=False, maxdepth=None):
        remove = super().rm
        return self._request("remove", path, lambda: remove(path, recursive))

    def rm_file(self, path):
        remove = super().rm_file
        return self._request("remove", path, lambda: remove(path))

    def cat_file(self, path, start=None, end=None, **kwargs):
        if self.unreachable and self.unreachable in path:
            raise ConnectionError("the store is down")
        content = super().cat_file(path, start, end)
        type(self).reads.append((path, len(content)))
        return content

    def _open(self, path, mode="rb", **kwargs):
        if mode != "wb" or "data" in kwargs:
            return super()._open(path, mode, **kwargs)
        return Upload(self, path)


class Upload:
    """A multipart upload: an object at its completion, nothing before."""

    closed = False

    def __init__(self, system, path):
        self._system, self._path, self._parts = system, path, []

    def write(self, data):
        self._system._request("part", self._path, lambda: self._parts.append(bytes(data)))
        return len(data)

    def close(self):
        if not self.closed:
            data = b"".join(self._parts)
            self._system._request("complete", self._path, lambda: self._put(data))
        self.closed = True

    def discard(self):
        self.closed = True

    def _put(self, data):
        path = self._system._strip_protocol(self._path)
        self._system.store[path] = MemoryFile(self._system, path, data)


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """An empty folder of a store without faults; no attempt waits for the next."""
    FaultyStore.store, FaultyStore.requests, FaultyStore.faults = {}, [], {}
    FaultyStore.reads = []
    FaultyStore.pseudo_dirs, FaultyStore.after, FaultyStore.unreachable = [""], False, ""
    fsspec.register_implementation("memory", FaultyStore, clobber=True)
    monkeypatch.setattr(store_module, "PAUSES_S", (0.0, 0.0, 0.0))
    # An upload of a killed process is never completed, as a buffered file's would be.
    monkeypatch.setattr(store_module, "_discard", lambda file: file.discard())
    yield place("memory://bucket/run")
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


def save(root, step, value=None, *, run="run", keep=1, saver=None):
    """Save a step with one matrix; return the saver."""
    value = float(step) if value is None else value
    saver = saver or Saver(root, ALONE, keep, lambda saved: None, run=run)
    chunks = Chunks([Chunk("m", (0, 0), MATRIX + value)], [Chunk("exp_avg.m", (0, 0), MATRIX)])
    saver.save(step, chunks, {}, {"model.json": "{}"})
    return saver


def numbers(root):
    return [int(path.name.removeprefix("step-")) for path in steps(root)]


def value_of(folder):
    return stored_of(folder, WEIGHTS).whole("m")[0, 0].item()


def fail_at(number, fault, *, after=False):
    FaultyStore.requests, FaultyStore.after = [], after
    FaultyStore.faults = {} if number is None else {number: fault}


def test_a_step_is_saved_verified_and_read(root):
    save(root, 2)
    (step,) = steps(root)
    assert str(step) == "memory://bucket/run/step-00000002"
    assert verify(step)["step"] == 2
    assert value_of(step) == 2.0
    good = newest_good(root, ALONE, pytest.fail)
    assert (good.folder, good.manifest["run"]) == (step, "run")
    assert [facts.problem for facts in inspect(root, verified=True)] == [None]
    assert (root / "latest").read() == b"step-00000002\n"


def test_the_manifest_is_the_last_object_of_a_step(root):
    with contextlib.suppress(CheckpointError):
        save(root, 2)
    written = [path for kind, path in FaultyStore.requests if kind in ("put", "complete")]
    of_step = [path.rpartition("/")[2] for path in written if step_name(2) in path]
    shards = ["weights-00000.safetensors", "optimizer-00000.safetensors"]
    assert of_step == [*shards, "model.json", MANIFEST]


def test_any_region_is_read_by_its_byte_ranges(root):
    vector = torch.arange(5, dtype=torch.bfloat16)
    write_chunks(root / "a", [Chunk("m", (0, 0), MATRIX[:3]), Chunk("v", (0,), vector)])
    write_chunks(root / "b", [Chunk("m", (3, 0), MATRIX[3:]), Chunk("n", (), torch.tensor(7.0))])
    stored = Stored([root / "a", root / "b"])
    assert torch.equal(stored.whole("v"), vector)
    assert stored.whole("n").item() == 7.0
    for rows in ((0, 6), (1, 2), (2, 5), (3, 6), (4, 4)):
        for columns in ((0, 4), (0, 1), (1, 3), (2, 4)):
            read = stored.read("m", (rows, columns))
            assert torch.equal(read, MATRIX[slice(*rows), slice(*columns)])


SPANS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 900), st.sampled_from([1, 7, 40, 100])),
    max_size=40,
)


@given(spans=SPANS, in_order=st.booleans())
def test_spans_read_ahead_are_theirs_and_few_bytes_are_in_memory(spans, in_order):
    root = place("memory://bucket/ahead")
    contents = {name: bytes((ord(name) + n) % 251 for n in range(1000)) for name in "abc"}
    for name, content in contents.items():
        (root / name).write_bytes(content)
    spans = [ByteRange(root / name, start, start + size) for name, start, size in spans]
    spans = sorted(spans) if in_order else spans
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PIECE": 100, "REQUESTS": 2, "_GAP": 10}.items():
            patch.setattr(ranged, name, value)
        ahead = ReadAhead(spans)
        for span in spans:
            assert ahead.take(span) == contents[span.path.name][span.start : span.stop]
            assert ahead.unread <= 2 * 2 * 100
        assert ahead.unread == 0
        assert all(ahead.take(span) is None for span in spans)  # each as often as announced


def test_neighbours_are_read_by_one_request_and_beside_each_other(root):
    """In whatever order they are asked for; what lies far from them is left out."""
    chunks = [Chunk(f"m{n}", (0, 0), MATRIX + n) for n in range(20)]
    far = Chunk("far", (0,), torch.zeros(2**17))
    write_chunks(root / "a", [*chunks[:10], far, *chunks[10:]])
    stored = Stored([root / "a"])
    regions = [(chunk.name, ((1, 6), (0, 4))) for chunk in reversed(chunks)]
    FaultyStore.reads = []
    stored.read_ahead(regions)
    for name, region in regions:
        assert torch.equal(stored.read(name, region), MATRIX[1:6] + int(name[1:]))
    assert len(FaultyStore.reads) == 2
    assert sum(size for _, size in FaultyStore.reads) < 20 * MATRIX.nbytes
    assert torch.equal(stored.read("m3", ((0, 1), (1, 2))), MATRIX[:1, 1:2] + 3)  # not announced
    assert len(FaultyStore.reads) == 3


def test_a_fault_of_a_read_ahead_is_that_of_the_tensor(root):
    write_chunks(root / "a", [Chunk("m", (0, 0), MATRIX)])
    stored = Stored([root / "a"])
    FaultyStore.unreachable = "/a"
    stored.read_ahead([("m", ((0, 6), (0, 4)))])
    with pytest.raises(StoreError, match="the store is down"):
        stored.whole("m")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        *(
            len(text).to_bytes(8, "little") + text + bytes(16)
            for text in (
                b'{"m": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
                b'{"m": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
                b'{"m": {"dtype": "F32", "shape": [1], "data_offsets": [-8, 4]}}',
                b'{"m": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}',
                b'{"m": 1}',
            )
        ),
    ],
)
def test_a_hostile_header_is_refused(root, data):
    (root / "a").write_bytes(data)
    with pytest.raises(CheckpointError):
        Stored([root / "a"])


def requests_of_a_save(root):
    """Return how many requests a save makes that removes an old step, and leave step 4."""
    saver = save(root, 2)
    fail_at(None, None)
    save(root, 4, saver=saver)
    return len(FaultyStore.requests)


@pytest.mark.parametrize("after", [False, True])
def test_a_process_killed_at_any_request_of_a_save_loses_and_tears_nothing(root, after):
    """The restarted one sees whole steps alone, and saves the step again; leftovers go."""
    for number in range(requests_of_a_save(root)):
        FaultyStore.store = {}
        saver = save(root, 2)
        fail_at(number, Killed(), after=after)
        with pytest.raises(Killed):
            save(root, 4, saver=saver)
        kind, path = FaultyStore.requests[-1]
        fail_at(None, None)
        good = newest_good(root, ALONE, pytest.fail)
        step = int(good.manifest["step"])
        assert value_of(good.folder) == step, f"killed at {kind} {path}"
        assert 4 in numbers(root) or step == 2
        assert not any(facts.problem for facts in inspect(root, verified=True))
        save(root, 4)
        save(root, 6)
        assert numbers(root) == [6]
        left = {name.partition("/")[0] for name in root.files() if name.startswith("step-")}
        assert left == {step_name(6)}, f"killed at {kind} {path}"


@pytest.mark.parametrize("after", [False, True])
def test_a_fault_that_passes_is_not_noticed(root, after):
    """Also where a request was done and only its answer was lost."""
    for number in range(requests_of_a_save(root)):
        FaultyStore.store = {}
        saver = save(root, 2)
        fail_at(number, ConnectionError("500 Internal Server Error"), after=after)
        save(root, 4, saver=saver)
        assert numbers(root) == [4]
        assert value_of(verified(root)) == 4.0


def verified(root):
    step = steps(root)[-1]
    verify(step)
    return step


def test_a_fault_that_lasts_fails_the_save_and_keeps_the_steps_before(root):
    saver = save(root, 2)
    FaultyStore.requests = []
    FaultyStore.faults = {n: ConnectionError("503 at http://host/x?sig=SECRET") for n in range(99)}
    with pytest.raises(CheckpointError, match="503") as raised:
        save(root, 4, saver=saver)
    assert "SECRET" not in str(raised.value)
    FaultyStore.faults = {}
    assert numbers(root) == [2]
    save(root, 4)
    assert numbers(root) == [4]


def test_a_commit_whose_answers_are_all_lost_leaves_a_whole_step_or_none(root):
    count = requests_of_a_save(root)
    manifest = next(n for n, (_, path) in enumerate(FaultyStore.requests) if MANIFEST in path)
    for after in (False, True):
        FaultyStore.store = {}
        saver = save(root, 2)
        fail_at(None, None, after=after)
        FaultyStore.faults = dict.fromkeys(range(manifest, count + 9), ConnectionError("lost"))
        with pytest.raises(CheckpointError, match="lost"):
            save(root, 4, saver=saver)
        FaultyStore.faults = {}
        assert numbers(root) == ([2, 4] if after else [2])
        assert [verify(step)["step"] for step in steps(root)] == numbers(root)


def test_an_upload_that_fails_leaves_no_object(root):
    def half(file):
        file.write(b"half")
        raise PermissionError("no more")

    with pytest.raises(StoreError, match="no more"):
        (root / "x").upload(half)
    assert root.files() == {}


def test_what_another_attempt_cannot_mend_is_not_tried_again(root):
    fail_at(0, PermissionError("Access Denied"))
    with pytest.raises(StoreError, match="Access Denied"):
        (root / "x").write_bytes(b"1")
    assert len(FaultyStore.requests) == 1


def test_a_store_that_is_down_condemns_no_step(root):
    save(root, 4, saver=save(root, 2, keep=2))
    FaultyStore.unreachable = f"{step_name(4)}/try-"
    with pytest.raises(CheckpointError, match="the store is down"):
        newest_good(root, ALONE, lambda problem: None)
    FaultyStore.unreachable = ""
    assert numbers(root) == [2, 4]


@given(st.data())
def test_a_damaged_object_is_named_and_the_step_before_is_taken(data):
    """Shortened, changed, or missing; the damaged step can be saved again."""
    FaultyStore.store = {}
    root = place("memory://bucket/run")
    save(root, 4, saver=save(root, 2, keep=2))
    newest = steps(root)[-1]
    files = sorted(name for name in newest.files() if name != MANIFEST)
    name = data.draw(st.sampled_from([*files, MANIFEST]))
    content = (newest / name).read()
    kind = data.draw(st.sampled_from(["cut", "bit", "gone"]))
    # Without the end of its last line alone, a manifest says the same.
    at = data.draw(st.integers(0, len(content) - (2 if name == MANIFEST else 1)))
    if kind == "gone":
        (newest / name).remove()
    else:
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        (newest / name).write_bytes(content[:at] if kind == "cut" else flipped)
    problems = []
    good = newest_good(root, ALONE, problems.append)
    if (kind, name) == ("gone", MANIFEST):  # then it is not a step
        assert problems == []
    elif name != MANIFEST or problems:
        assert name.rpartition("/")[2] in problems[0]
    assert good.manifest["step"] == (2 if problems or name == MANIFEST else 4)
    save(root, 4, keep=2)
    assert numbers(root) == [2, 4]
    assert value_of(verified(root)) == 4.0


def test_a_set_aside_step_is_kept_and_its_place_is_free(root):
    save(root, 2)
    (step,) = steps(root)
    before = {name: (step / name).read() for name in step.files() if name != MANIFEST}
    aside = set_aside(step)
    assert not is_there(step)
    assert numbers(root) == []
    clean(root)
    assert json.loads(aside.read())["step"] == 2
    assert {name: (step / name).read() for name in before} == before


def test_of_two_writers_of_a_step_one_commits(root):
    """And the other says so, and takes none of its files with it."""
    facts = [{"run": "run", "writer": n} for n in range(2)]
    folders = [begin(root, 2, "run") for _ in facts]
    for folder, fact in zip(folders, facts, strict=True):
        (folder / "model.json").write_text(str(fact["writer"]))
    seal(folders[1], 2, {}, facts[1])
    with pytest.raises(CheckpointError, match="committed by another process"):
        seal(folders[0], 2, {}, facts[0])
    assert verify(steps(root)[0])["writer"] == 1
    assert (root / step_name(2)).files().keys() == {MANIFEST, f"{folders[1].name}/model.json"}


def test_a_process_that_another_has_replaced_commits_nothing(root):
    held_up = save(root, 2)
    save(root, 4, saver=(second := save(root, 3, keep=9)))
    with pytest.raises(CheckpointError, match="another process has taken over"):
        save(root, 5, saver=held_up)
    save(root, 6, saver=second)
    assert numbers(root) == [2, 3, 4, 6]
    assert not any("try-" in name and "00000005" in name for name in root.files())


def test_a_file_that_disappears_before_the_commit_prevents_it(root):
    writer = claim(root, "run")
    folder = begin(root, 2, "run")
    entry = write_chunks(folder / "weights-00000.safetensors", [Chunk("m", (0, 0), MATRIX)])
    files = {"weights-00000.safetensors": entry}
    claim(root, "run")  # another process of the run cleans up meanwhile
    with pytest.raises(CheckpointError, match="taken over"):
        seal(folder, 2, files, {}, writer=writer)
    with pytest.raises(CheckpointError, match="the store has none"):
        seal(folder, 2, files, {})
    assert numbers(root) == []


def test_another_runs_steps_are_left_alone(root):
    save(root, 2, run="one")
    before = root.files()
    with pytest.raises(CheckpointError, match="another run's by now"):
        save(root, 4, run="two")
    assert root.files() == before
    (root / LOCK).write_text(json.dumps({"run": "two", "writer": "w"}))
    with pytest.raises(CheckpointError, match="run two has locked it"):
        begin(root, 4, "one")


def test_old_steps_go_and_the_best_stays(root):
    saver = save(root, 2, keep=1)
    point(root, BEST, step_name(2))
    for step in (4, 6):
        save(root, step, saver=saver)
    assert numbers(root) == [2, 6]
    assert best_step(root) == root / step_name(2)
    saver.keep_best(6)
    assert numbers(root) == [6]
    save(root, 8, saver=saver)
    assert [path.name for path in prune(root, 1)] == []


def test_an_async_save_ends_before_the_next_begins(root):
    saved = []
    saver = Saver(root, ALONE, 2, saved.append, run="run", during_training=True)
    for step in (2, 4):
        save(root, step, saver=saver)
        saver.before_update()
    saver.finish()
    assert [entry.step for entry in saved] == numbers(root) == [2, 4]


@pytest.mark.parametrize(
    "url",
    [
        *("s3://KEY:hunter2@bucket/run", "s3://hunter2@bucket/run", "s3://bucket/run?key=hunter2"),
        *("abfs://box:hunter2@account.host/run", "gs://hunter2@bucket/run"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="credentials in it is refused") as raised:
        place(url)
    assert "hunter2" not in str(raised.value)


def test_a_url_names_a_known_store_and_a_folder():
    assert str(place("abfs://box@account.dfs.core.windows.net/run/")).endswith("net/run")
    for url in ("http://host/run", "s3://", "s3://bucket/../other"):
        with pytest.raises(ConfigError, match=r"not a known object store|names no folder"):
            place(url)
    assert place("s3:/bucket").name == "bucket"  # a path


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    def missing(*args, **kwargs):
        raise ImportError("Install gcsfs")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(ConfigError, match=r'gcsfs.*pip install "meshwright\[gs\]"'):
        StorePath.parse("gs://bucket/run").files()


def test_a_manifest_names_no_path(root):
    save(root, 2)
    (step,) = steps(root)
    manifest = {**read_manifest(step), "attempt": "../../elsewhere"}
    (step / MANIFEST).write_text(manifest_text(manifest))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        read_manifest(step)
