"""Blends: shares at every moment, each source whole in its epochs, the same on any layout."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint.identity import refuse_changed
from meshwright.cli import main
from meshwright.data import Blend, open_data
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.spec.loading import load_config
from meshwright.spec.training import DataSpec

weights = st.lists(st.floats(0.001, 1000), min_size=1, max_size=12)


@pytest.fixture
def sources(tmp_path):
    """Three files whose bytes tell them apart."""
    found = []
    for letter, count in (("a", 40), ("b", 90), ("c", 30)):
        path = tmp_path / f"{letter}.txt"
        path.write_text("<|endoftext|>".join(letter * (20 + n) for n in range(count)))
        found.append(str(path))
    return found


@pytest.mark.slow
@given(weights)
def test_shares_are_near_at_every_moment_and_no_sample_is_left_out(weights):
    blend = Blend(weights)
    bound = 0.5 if len(weights) == 2 else 2.0
    counts = [0] * len(weights)
    for sample in range(400):
        assert blend.counts(sample) == counts
        source, place = blend.place(sample)
        assert place == counts[source]
        counts[source] += 1
        for share, count in zip(blend.shares, counts, strict=True):
            assert abs(count - share * (sample + 1)) <= bound


def test_shares_are_those_written_and_exact_far_away():
    blend = Blend([0.7, 0.2, 0.1])
    assert blend.counts(10) == [7, 2, 1]
    far = 10**21
    assert blend.counts(far) == [7 * far // 10, 2 * far // 10, far // 10]
    assert blend.place(far) == (blend.place(0)[0], blend.counts(far)[blend.place(0)[0]])
    assert Blend([3, 1]).shares == Blend([0.75, 0.25]).shares
    assert sum(Blend([1 / 3] * 3).shares) == 1


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_rows_come_from_each_source_in_its_own_order(sources, tmp_path, packing):
    spec = DataSpec(source=tuple(sources), weights=(2, 1, 1), validation=0.1, packing=packing)
    data = open_data(spec, tmp_path)
    sampler = data.sampler("train", 16, 8)
    alone = [sampler.samplers[number] for number in range(3)]
    seen = [0, 0, 0]
    for step in range(60):
        rows = sampler.rows(step)
        letters = [max(set(row) - {256}) - ord("a") for row in rows.inputs.tolist()]
        assert np.bincount(letters, minlength=3).tolist() == [4, 2, 2]
        for row, source in enumerate(letters):
            own = alone[source].read([seen[source]])
            assert np.array_equal(rows.inputs[row], own.inputs[0])
            assert np.array_equal(rows.targets[row], own.targets[0])
            assert (rows.segments is None) == (packing == "stream")
            seen[source] += 1
        for ranks in (2, 4):  # on another layout
            size = 8 // ranks
            cut = [sampler.rows(step, range(r * size, (r + 1) * size)) for r in range(ranks)]
            assert np.array_equal(np.concatenate([part.inputs for part in cut]), rows.inputs)
    passes = sampler.passes(60 * 8)
    assert [one["epochs"] * one["samples"] for one in passes] == pytest.approx(seen)
    assert passes[0]["epochs"] > 1


def test_each_source_holds_out_its_share(sources, tmp_path):
    spec = DataSpec(source=tuple(sources), weights=(1, 1, 2), validation=0.1)
    data = open_data(spec, tmp_path)
    assert [part.validation.documents for part in data.parts] == [4, 9, 3]
    held = data.sampler("validation", 8, 4)
    assert {chr(max(row)) for row in held.rows(0).inputs} == {"a", "b", "c"}
    letters = [chr(max(set(row.tolist()) - {256})) for row in held.rows(0).inputs]
    assert sorted(letters) == ["a", "b", "c", "c"]
    # Before any source begins anew
    counts = held.blend.counts(held.samples)
    assert all(n <= s.samples for n, s in zip(counts, held.samplers, strict=True))


def test_the_entropy_is_that_of_the_blend(sources, tmp_path):
    both = tuple(sources[:2])
    equal = open_data(DataSpec(source=both, weights=(1, 1)), tmp_path)
    skewed = open_data(DataSpec(source=both, weights=(1000, 1)), tmp_path)
    # Two letters as often as each other, beside few ends of documents
    assert equal.unigram_entropy == pytest.approx(np.log(2), rel=0.2)
    assert skewed.unigram_entropy < 0.2


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["data.weights=[1, 2]"], r"data.weights = \[1.0, 2.0\]: 2 weights for 1 sources"),
        (['data.source=["a", "b"]', "data.weights=[1, 0]"], "each must be above 0"),
        (['data.source=["a", "b"]', "data.weights=[1, -2.5]"], "each must be above 0"),
        (['data.source=["a", "b"]', 'data.weights=["1", 2]'], "data.weights"),
    ],
)
def test_refusals(words, match):
    with pytest.raises(ConfigError, match=match):
        load_config(None, words)


def test_a_source_shorter_than_a_sample_is_named(sources, tmp_path):
    data = open_data(DataSpec(source=tuple(sources[:2]), weights=(1, 1)), tmp_path)
    with pytest.raises(DataError, match=r"train split of .*a.txt has \d+ tokens, one sample"):
        data.sampler("train", 3000, 2)


def test_other_weights_are_another_run(sources, tmp_path):
    both = tuple(sources[:2])
    some = [None, (1.0, 1.0), (1.0, 2.0)]
    found = [open_data(DataSpec(source=both, weights=w), tmp_path).identity for w in some]
    for then, now in ((0, 1), (1, 2), (1, 0)):
        manifest = {"step": 3, "identity": found[then]}
        with pytest.raises(CheckpointError, match=r"weights was .*--allow-changed weights"):
            refuse_changed(manifest, found[now], "", ())
        refuse_changed(manifest, found[now], "", ("weights",))


def test_a_run_tells_how_often_it_reads_each_source(sources, config, tmp_path, capsys):
    listed = json.dumps(sources)
    words = [f"data.source={listed}", "data.weights=[1, 1, 2]", f"data.cache={tmp_path}"]
    model = ["model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1"]
    sizes = ["train.steps=3", "train.batch=4", "train.seq_len=8", "train.eval_every=3"]
    where = ["cluster.device=cpu", "layout.dp_replicate=1", f"log.dir={tmp_path}", "log.name=r"]
    assert main(["train", *words, *model, *sizes, *where]) == 0
    events = [json.loads(line) for line in (tmp_path / "r/events.jsonl").open()]
    blend = events[0]["blend"]
    assert [one["source"] for one in blend] == sources
    assert [one["share"] for one in blend] == [0.25, 0.25, 0.5]
    assert [round(one["epochs"] * one["samples"]) for one in blend] == [3, 3, 6]
    assert any(event["event"] == "eval" for event in events)
