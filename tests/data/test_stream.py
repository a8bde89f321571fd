"""Streams: the order of a plain loop, the same rows on any layout, resumed at any step exactly."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.checkpoint.commit import read_manifest, step_name, steps
from meshwright.data import IGNORE, StreamPosition, open_data
from meshwright.data.permutation import permute
from meshwright.data.tokenizers import BytesTokenizer
from meshwright.errors import ConfigError, DataError
from meshwright.runtime.session import prepare_job
from meshwright.spec.loading import load_config
from meshwright.spec.training import DataSpec
from meshwright.training.loop import train
from meshwright.training.run_folder import create, read_job
from ranks import RankError, on_ranks
from runs import clean_environ

BATCH, SEQ, BLOCK = 4, 16, 7
TEXTS = [f"{n:03d}" + "xyz"[n % 3] * (n * 37 % 50) for n in range(90)]
TEXTS[11] = "  \n"  # blank ones are left out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same rows as jsonl and as parquet, two files each."""
    root = tmp_path_factory.mktemp("streams")
    for kind in ("jsonl", "parquet"):
        (root / kind).mkdir()
    for part, texts in enumerate((TEXTS[:50], TEXTS[50:])):
        rows = (json.dumps({"id": n, "text": text}) for n, text in enumerate(texts))
        (root / "jsonl" / f"train-{part}.jsonl").write_text("\n".join(rows))
        table = pa.table({"text": texts, "id": list(range(len(texts)))})
        pq.write_table(table, root / "parquet" / f"train-{part}.parquet", row_group_size=9)
    return root


def told(position):
    """Return a position without the library's own note of it, which differs after a resume."""
    values = position if isinstance(position, dict) else position.to_json()
    return values | {"place": values["place"] | {"state": None}}


def opened(folder, **words):
    spec = DataSpec(
        source=f"hf:{folder}",
        streaming=True,
        shuffle_buffer=BLOCK,
        validation=0.1,
        seed=5,
        **words,
    )
    return open_data(spec, Path("no-such-cache"))


def rows_by_hand(epochs=7):
    """Return the tokens of each row of the batch, by a loop over all documents."""
    tokens, given, document = [[] for _ in range(BATCH)], [0] * BATCH, 0
    for epoch in range(epochs):
        kept = [text for n, text in enumerate(TEXTS) if n % 10 and text.strip()]
        for start in range(0, len(kept), BLOCK):
            block = kept[start : start + BLOCK]
            order = permute(np.arange(len(block)), len(block), f"5/{epoch}/{document}")
            for number in order:
                row = given.index(min(given))
                given[row] += len(block[number])
                tokens[row] += [*block[number].encode(), 256]
            document += len(block)
    return tokens


@pytest.mark.often(1)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_those_of_a_plain_loop_and_nothing_is_stored(folders, kind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sampler = opened(folders / kind).sampler("train", SEQ, BATCH)
    expected, steps = rows_by_hand(), 200
    assert min(map(len, expected)) > steps * SEQ + 1  # of which several epochs are read
    assert steps * SEQ * BATCH > 2 * sum(len(text) + 1 for text in TEXTS)
    for step in range(steps):
        found = sampler.rows(step)
        for row in range(BATCH):
            window = expected[row][step * SEQ : step * SEQ + SEQ + 1]
            assert found.inputs[row].tolist() == window[:-1]
            assert found.targets[row].tolist() == window[1:]
    assert list(tmp_path.iterdir()) == []


def test_held_out_documents_never_train_and_are_what_is_evaluated(folders):
    data = opened(folders / "jsonl")
    held = {text[:3] for text in TEXTS[::10]}
    sampler = data.sampler("train", SEQ, BATCH)
    read = np.concatenate([sampler.rows(step).inputs for step in range(150)], axis=1)
    joined = ("".join(chr(i) if i < 256 else "|" for i in row).rpartition("|")[0] for row in read)
    trained = {text[:3] for row in joined for text in row.split("|")}
    assert len(trained) == 90 - 9 - 1
    assert not trained & held
    evaluated = data.held_out(SEQ, 2, 4)
    assert evaluated.samples >= 8
    whole = evaluated.view.read(0, len(evaluated.view)).tolist()
    text = [ids for held in TEXTS[::10] for ids in (*held.encode(), 256)]
    assert whole == text[: len(whole)]
    assert data.held_out(SEQ, 2, 4).view is evaluated.view
    assert data.held_out(SEQ, 2, 1000).samples == (len(text) - 1) // SEQ


@pytest.mark.often(1)
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_any_layout_reads_the_same_rows_and_has_the_same_position(folders, packing):
    whole = opened(folders / "jsonl", packing=packing).sampler("train", SEQ, BATCH)
    expected = [(whole.rows(step), whole.position()) for step in range(40)]
    for ranks in (2, 4):
        size = BATCH // ranks
        parts = []
        for rank in range(ranks):
            sampler = opened(folders / "jsonl", packing=packing).sampler("train", SEQ, BATCH)
            mine = range(rank * size, (rank + 1) * size)
            parts.append([(sampler.rows(step, mine), sampler.position()) for step in range(40)])
        for step, (rows, position) in enumerate(expected):
            found = [part[step] for part in parts]
            for name in ("inputs", "targets", "segments"):
                if packing == "stream" and name == "segments":
                    assert rows.segments is None
                    continue
                joined = np.concatenate([getattr(one, name) for one, _ in found])
                assert np.array_equal(joined, getattr(rows, name))
            joined = StreamPosition.joined(at for _, at in found)
            assert told(joined) == told(position)
            if packing == "documents":
                ends = rows.inputs == 256
                assert np.array_equal(rows.targets == IGNORE, ends)
                assert np.array_equal(np.diff(rows.segments), ends[:, :-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_it_goes_on_from_any_step_on_another_layout(folders, kind):
    whole = opened(folders / kind).sampler("train", SEQ, BATCH)
    rows, positions = [], [whole.position()]
    for step in range(120):
        rows.append(whole.rows(step).inputs)
        positions.append(whole.position())
    assert positions[-1].mark.place.epoch > 1
    for stop in (*range(0, 40, 3), 47, 66, 91, 110):
        stored = json.loads(json.dumps(positions[stop].to_json()))
        for mine in (range(4), range(1, 3)):
            again = opened(folders / kind).sampler("train", SEQ, BATCH)
            again.seek(stored)
            for step in range(stop, min(stop + 25, 120)):
                assert np.array_equal(
                    again.rows(step, mine).inputs, rows[step][mine.start : mine.stop]
                )
                if len(mine) == BATCH:
                    assert told(again.position()) == told(positions[step + 1])
                if step == stop + 8 and len(mine) == BATCH:  # resumed from a resumed one's position
                    second = json.loads(json.dumps(again.position().to_json()))
                    again = opened(folders / kind).sampler("train", SEQ, BATCH)
                    again.seek(second)


def test_a_rank_tokenises_its_own_documents_only(folders, monkeypatch):
    seen = []
    pack = BytesTokenizer.pack
    monkeypatch.setattr(
        BytesTokenizer, "pack", lambda self, texts: seen.extend(texts) or pack(self, texts)
    )
    sampler = opened(folders / "jsonl").sampler("train", SEQ, BATCH)
    for step in range(20):
        sampler.rows(step, range(2, 3))
    alone = len(seen)
    assert 0 < alone < 35
    sampler = opened(folders / "jsonl").sampler("train", SEQ, BATCH)
    for step in range(20):
        sampler.rows(step)
    assert len(seen) - alone > 3 * alone


def test_what_has_changed_is_noticed(folders, tmp_path):
    sampler = opened(folders / "jsonl").sampler("train", SEQ, BATCH)
    for step in range(12):
        sampler.rows(step)
    position = sampler.position().to_json()
    copy = tmp_path / "copy"
    shutil.copytree(folders / "jsonl", copy)
    path = copy / "train-0.jsonl"
    row = position["place"]["row"] + 4
    path.write_text(path.read_text().replace(f"{row:03d}", f"{row:03d} edited"))
    again = opened(copy).sampler("train", SEQ, BATCH)
    again.seek(position)
    with pytest.raises(
        DataError, match=r"is not what the run was reading: row \d+ and those after"
    ):
        again.rows(12)
    other = opened(folders / "jsonl").sampler("train", SEQ, BATCH * 2)
    with pytest.raises(DataError, match=r"as 4 rows, train.batch = 8"):
        other.seek(position)


def test_steps_come_in_order(folders):
    sampler = opened(folders / "jsonl").sampler("train", SEQ, BATCH)
    sampler.rows(3)
    with pytest.raises(IndexError, match="at step 4 of"):
        sampler.rows(6)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["data.source=stdlib"], "reads hf:NAME or hf:PATH, data.source = 'stdlib'"),
        (["data.source=corpus"], "nearest legal: hf:corpus"),
        (['data.source=["hf:a", "hf:b"]'], "reads one source, data.source names 2"),
        (["data.source=hf:a", "data.shuffle_buffer=0"], "shuffle_buffer"),
        (["data.source=hf:a", "data.on_error=skip"], "stops at a row without text"),
    ],
)
def test_refused_configs(words, match):
    with pytest.raises(ConfigError, match=match):
        load_config(None, ["data.streaming=true", *words])


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"txt": "a"}], "no field 'text'; nearest legal: txt"),
        ([{"text": "held out"}, {"text": 5}], r"row 0: field 'text' is a|row 1: .*|cannot load"),
        ([{"text": "held out"}, {"text": " "}], "has no document to train on"),
    ],
)
def test_refused_data(tmp_path, rows, match):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    spec = DataSpec(source=f"hf:{file}", streaming=True, validation=0.1)
    train_spec = load_config(None, ["train.eval_every=1"]).train
    with pytest.raises(DataError, match=match):
        open_data(spec, tmp_path).check(train_spec)


def run_on(world, folder, resume=False):
    """The body of a rank: train the job of a folder, and say what came of it."""
    job = read_job(Path(folder))
    dataset = open_data(job.config.data, job.cache, vocab_size=job.config.model.vocab_size)
    events = []
    train(job, world, dataset, events.append, lambda: False, resume)
    return {e["step"]: e["loss"] for e in events if e["event"] in ("step", "eval")}


def go(job, **arguments):
    return on_ranks(job.layout.world, run_on, folder=str(job.folder.path), **arguments)[0]


def cut_after(job, step, name):
    """Return a copy of a run as it would be had it been killed after a step."""
    folder = job.folder.path.with_name(name)
    shutil.copytree(job.folder.path, folder)
    for path in steps(folder / "checkpoints"):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    return replace(job, folder=type(job.folder)(folder))


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit_and_on_another_layout(config, folders, tmp_path):
    words = ["train.steps=8", "checkpoint.every=1", "checkpoint.keep=20", "train.eval_every=4"]
    data = ["data.streaming=true", f"data.source=hf:{folders / 'parquet'}"]
    sizes = [f"data.shuffle_buffer={BLOCK}", "data.validation=0.1", "train.eval_batches=1"]
    job = prepare_job(config(*words, *data, *sizes, "layout.dp_replicate=2"), clean_environ())
    assert not (tmp_path / "cache").exists()
    create(job)
    losses = go(job)

    half = cut_after(job, 5, "half")
    assert go(half, resume=True) == {step: losses[step] for step in (6, 7, 8)}
    ends = [read_manifest(one.checkpoints / step_name(8)) for one in (job, half)]
    assert ends[0]["files"] == ends[1]["files"]

    alone = cut_after(job, 5, "alone")
    alone = replace(alone, layout=type(job.layout)(microbatch=2))
    create(alone)
    again = go(alone, resume=True)
    assert sorted(again) == [6, 7, 8]
    for step, loss in again.items():
        assert loss == pytest.approx(losses[step], rel=2e-5)
    ends.append(read_manifest(alone.checkpoints / step_name(8)))
    places = [told(end["position"]) for end in ends]
    assert places[0] == places[1] == places[2]
    before = read_manifest(job.checkpoints / step_name(7))["position"]
    assert before["rows"] != places[0]["rows"]

    other = config(*words, *data, "data.shuffle_buffer=8", "data.validation=0.1", "train.steps=9")
    create(replace(half, config=other))
    with pytest.raises(RankError, match="data was"):
        go(replace(half, config=other), resume=True)
