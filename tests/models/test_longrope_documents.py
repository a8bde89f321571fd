"""longrope follows the length of a document, whatever row or batch it is in."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from meshwright.checkpoint.weights import load_model
from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.data import open_data
from meshwright.data.sampler import IGNORE
from meshwright.evaluate.perplexity import score
from meshwright.evaluate.requests import Ask, answer
from meshwright.evaluate.text import Windows
from meshwright.layout import Layout
from meshwright.models import build_model, init_model
from meshwright.models.generate import generate
from meshwright.models.hf import save_hf
from meshwright.models.rope import Rope, lengths_of
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.parity import check, prove_parity
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks

SHORT, LONG = [1.0, 1.1, 1.2, 1.5], [1.0, 2.0, 3.0, 5.0]
ORIGINAL = 8
LONGROPE = {
    "kind": "longrope",
    "factor": 4.0,
    "original_context": ORIGINAL,
    "short_factor": SHORT,
    "long_factor": LONG,
}
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 48}


def spec_of(family="phi3", **more):
    words = {"vocab_size": 72, "context": 64, "init_std": 0.2, "rope_scaling": LONGROPE}
    return model_spec(family=family, **{**SIZES, **words, **more})


def model_of(**more):
    spec = spec_of(**more)
    return init_model(build_model(spec, "cpu"), spec, seed=0)


def packed(lengths, seed=0):
    """Return one row of documents of some lengths: ids and segments."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 72, (1, sum(lengths)), generator=generator)
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    return ids, of


@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_those_of_runs(seed):
    chosen = np.random.default_rng(seed)
    segments = torch.from_numpy(chosen.integers(-1, 3, (4, 30)))
    found = lengths_of(segments).tolist()
    for row, lengths in zip(segments.tolist(), found, strict=True):
        for at, number in enumerate(row):
            first = last = at
            while first and row[first - 1] == number:
                first -= 1
            while last + 1 < len(row) and row[last + 1] == number:
                last += 1
            assert lengths[at] == last - first + 1


@pytest.mark.parametrize("family", ["phi3", "llama", "qwen3"])
@pytest.mark.parametrize(
    "lengths",
    [[5, 6, 7], [8, 9], [30, 3], [3, 30], [1, 8, 12, 8, 2], [40], [8]],
    ids=str,
)
def test_a_packed_document_is_what_it_is_alone(family, lengths):
    model = model_of(family=family)
    ids, of = packed(lengths)
    with torch.no_grad():
        found = model(ids, of)
        for number in range(len(lengths)):
            alone = model(ids[of == number][None])
            torch.testing.assert_close(found[of == number], alone[0], atol=1e-5, rtol=1e-5)


def test_layers_with_bases_of_their_own_are_followed():
    """A base of its own is not scaled: it rotates short and long documents alike."""
    model = model_of(family="llama", rotary_pct=1.0)
    pattern = [{"window": 5, "rope_theta": 50.0}, {}]
    longer = model_of(family="gemma3", layer_pattern=pattern, vocab_size=72)
    for one in (model, longer):
        ids, of = packed([4, 20, 9])
        with torch.no_grad():
            found = one(ids, of)
            for number in range(3):
                alone = one(ids[of == number][None])
                torch.testing.assert_close(found[of == number], alone[0], atol=1e-5, rtol=1e-5)


def test_losses_are_those_of_transformers_document_by_document(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = model_of()
    save_hf(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids, of = packed([5, 8, 9, 20, 3])
    with torch.no_grad():
        found = model(ids, of)
        for number in range(5):
            wanted = theirs(ids[of == number][None]).logits[0]
            torch.testing.assert_close(found[of == number], wanted, atol=1e-4, rtol=1e-4)


def test_a_packed_document_is_what_generate_reads():
    """The token after a short document is the same in a long row and in a generation."""
    model = model_of()
    ids, of = packed([5, 30, 7])
    with torch.no_grad():
        after = model(ids, of).argmax(-1)
    for number, length in ((0, 5), (1, 30), (2, 7)):
        alone = ids[of == number][None]
        assert generate(model, alone, 1, temperature=0)[0, -1] == after[of == number][length - 1]


@pytest.mark.parametrize("size", [1, 2, 6])
def test_the_answer_to_a_request_does_not_depend_on_its_batch(size):
    model, generator = model_of(), torch.Generator().manual_seed(3)
    draw = [torch.randint(0, 72, (n,), generator=generator).tolist() for n in (4, 9, 30, 8, 12, 3)]
    asks = [Ask(ids[:-2], ids[-2:]) for ids in draw]
    found = answer(model, asks, 60, size * 30)
    for (nats, _), ids in zip(found, draw, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]]))[0, -2:]
        wanted = cross_entropy(logits, torch.tensor(ids[-2:]), reduction="sum")
        assert -nats == pytest.approx(wanted.item(), abs=1e-5)


def test_the_last_window_of_a_text_is_scored_by_its_own_length(tmp_path, monkeypatch):
    """It is shorter than the others of its batch, which are padded to them."""

    (tmp_path / "text.txt").write_text("abcdefgh" * 6 + "abcd")
    words = ["data.source=text.txt", "data.validation=0", "data.cache=cache"]
    monkeypatch.chdir(tmp_path)
    dataset = open_data(load_config(overrides=words).data, tmp_path / "cache", 320)
    view = dataset.sampler("train", 16, 1).view
    model = model_of(vocab_size=320)
    for packing in ("stream", "documents"):
        windows = Windows(view, seq_len=16, stride=16, packing=packing)
        count = len(windows)
        last = windows.lengths(count - 1, count)[0]
        assert last <= ORIGINAL < 16
        nats = []
        for first in (0, count - 1):
            rows = windows.rows(first, count)
            segments = None if rows.segments is None else torch.from_numpy(rows.segments)
            lengths = None
            if segments is None:
                lengths = torch.from_numpy(windows.lengths(first, count))
            inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
            nats.append(score(model, inputs, targets, segments, lengths).nats[-1].sum().item())
        assert nats[0] == pytest.approx(nats[1], abs=1e-5)


# Layouts.


def case_of(label, precision="fp32", **train):
    spec = TrainSpec(batch=8, seq_len=32, seed=3, precision=precision)
    return Case(spec_of(), spec.model_copy(update=train), Layout.parse(label), packed=True)


def proven(world, case):
    groups = open_groups(case.layout, world)
    return [*prove_parity(case, groups, world), *prove_conformance(case, groups, world)]


CASES = [
    case_of("dp2 mb2"),
    case_of("shard2 zero3 mb1 recompute-full", "bf16"),
    case_of("cp2-ring mb2"),
    case_of("cp2-ulysses mb4 recompute-selective"),
    case_of("tp2 sp mb2"),
    case_of("pp2 1f1b mb1"),
    case_of("tp2 sp cp2-ring mb2", "bf16"),
    case_of("pp2 zbv v2 mb2"),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", CASES, ids=lambda one: one.label)
def test_a_layout_is_one_device(case):
    if case.layout.stages > 2:
        case = Case(**{**vars(case), "model": case.model.model_copy(update={"n_layers": 4})})
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_a_proof_has_documents_of_both_kinds():
    lengths = lengths_of(make_batch(case_of("mb8"), 0).segments)
    assert (lengths > ORIGINAL).float().mean() > 0.2
    assert (lengths <= ORIGINAL).float().mean() > 0.2


def by_row(parallel):
    """Rotate all documents by the length of the row."""
    parallel._lengths = lambda batch: None


def by_share(parallel):
    """Rotate by what a rank of cp has of a document."""
    parallel._lengths = lambda batch: lengths_of(batch.segments[:, parallel.positions])


def failed(world, case, fault):
    groups = open_groups(case.layout, world)
    return [one.claim for one in check(case, groups, world, fault=fault) if not one.passed]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("fault", "label"), [(by_row, "dp2 mb2"), (by_row, "cp2-ring mb2"), (by_share, "cp2-ring mb2")]
)
def test_a_fault_is_caught(fault, label):
    assert on_ranks(2, failed, case=case_of(label), fault=fault)[0]


def test_a_run_on_packed_rows_has_the_loss_of_its_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_hf(model_of(vocab_size=264), tmp_path / "hf")
    texts = [chr(97 + n % 26) * (3 + n % 5) + "xyz" * (n % 3) for n in range(60)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    words = [
        *("model.init_from=hf", "data.source=d.jsonl", "data.packing=documents"),
        "data.tokenizer=bytes",
        *("data.validation=0", "data.cache=cache", "train.steps=1", "train.batch=4"),
        *("train.seq_len=40", "train.compile=false", "layout.dp_replicate=1"),
        *("cluster.device=cpu", "cluster.devices_per_node=1", "log.name=r", "log.trace=0"),
    ]
    assert main(["train", *words]) == 0, capsys.readouterr().err

    lines = (tmp_path / "runs/r/events.jsonl").read_text().splitlines()
    (loss,) = [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]
    config = load_config(overrides=words)
    rows = open_data(config.data, tmp_path / "cache", 264).sampler("train", 40, 4).rows(0)
    model, total, count, kinds = load_model(tmp_path / "hf"), 0.0, 0, set()
    for ids, targets, of in zip(rows.inputs, rows.targets, rows.segments, strict=True):
        for number in set(of.tolist()):
            kinds.add(bool((of == number).sum() > ORIGINAL))
            with torch.no_grad():
                logits = model(torch.from_numpy(ids[of == number])[None])[0]
            wanted = torch.from_numpy(targets[of == number])
            total += cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum").item()
            count += int((wanted != IGNORE).sum())
    assert kinds == {False, True}
    assert loss == pytest.approx(total / count, abs=1e-5)


def test_tables_are_kept_for_both_kinds():
    """A row of one kind after packed rows takes the same tables again."""
    rope, cpu = Rope(spec_of(), 32), torch.device("cpu")
    rope.build(cpu, 32)
    rope.reach(32, cpu, mixed_lengths=True)
    before = [one.data_ptr() for one in rope.held()]
    rope.reach(16, cpu)
    rope.reach(32, cpu, mixed_lengths=True)
    assert [one.data_ptr() for one in rope.held()] == before
    is_long = torch.tensor([[True] * 16 + [False] * 16])
    cos, _ = rope.tables(0, 32, is_long=is_long)
    assert cos.shape == (1, 1, 32, 8)
    assert torch.equal(cos[0, 0, :16], rope._tables[True][0][0][:16])
    assert torch.equal(cos[0, 0, 16:], rope._tables[False][0][0][16:])
