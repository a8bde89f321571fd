"""Perplexity: the windows, the scores, their uncertainty, and agreement with runs and others."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from torch.nn import functional as F

from hf_folders import TEXTS, hf_folder, model_of, write_run
from meshwright.cli import main
from meshwright.data import IGNORE, Sampler, load_tokenizer
from meshwright.data.view import Mask, Shard, split
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.evaluate import perplexity, text
from meshwright.evaluate.perplexity import measure, standard_error
from meshwright.evaluate.text import Conversations, Windows
from meshwright.spec.loading import load_config
from runs import TINY

CHAT = Path(__file__).parents[2] / "examples" / "chat" / "tokenizer"


@pytest.fixture(autouse=True)
def _the_same_weights():
    torch.manual_seed(0)


def view_of(tokens, ends=None, vocab=320):
    tokens = np.asarray(tokens, dtype=np.int64)
    ends = np.array([len(tokens)] if ends is None else ends, dtype=np.int64)
    return split([Shard(None, tokens, ends)], 0.0, vocab)[0]


def guide(count, max_length, stride):
    """The loop of Hugging Face's guide: (begin, end, first token scored) of each window."""
    found, before = [], 0
    for begin in range(0, count, stride):
        end = min(begin + max_length, count)
        targets = end - before
        found.append((begin, end, max(end - targets, begin + 1)))
        before = end
        if end == count:
            break
    return found


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
@pytest.mark.parametrize("count", [2, 5, 9, 10, 16, 17, 40, 41])
def test_windows_are_those_of_the_guide(count, stride):
    windows = Windows(view_of(np.arange(count)), 8, stride)
    found = []
    for row in range(len(windows)):
        rows = windows.rows(row, row + 1)
        kept = rows.targets[0] != IGNORE
        assert (rows.targets[0][kept] == rows.inputs[0][kept] + 1).all()
        first = rows.targets[0][kept][0]
        found.append((int(rows.inputs[0, 0]), int(rows.targets[0][kept][-1]) + 1, int(first)))
    # A window of the guide has one token more than inputs, and predicts it.
    assert sorted(found) == guide(count, 9, stride)
    assert sorted(t for b, e, first in found for t in range(first, e)) == list(range(1, count))


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_rows_are_those_that_a_run_evaluates(packing):
    tokens = np.random.default_rng(0).integers(0, 320, 205)
    view = view_of(tokens, [3, 40, 41, 130, 205])
    sampler = Sampler(view, seq_len=8, batch=5, seed=3, packing=packing)
    windows = Windows(view, 8, 8, packing, seed=3)
    assert windows.full == sampler.samples == 25
    assert len(windows) == 26
    for step in range(5):
        found, expected = windows.rows(5 * step, 5 * step + 5), sampler.rows(step)
        for name in ("inputs", "targets", "segments"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_a_document_is_scored_as_if_it_were_alone():
    model = model_of()
    lengths, tokens = [5, 1, 14, 7], np.random.default_rng(1).integers(0, 320, 27)
    ends = np.cumsum(lengths)
    apart = Windows(view_of(tokens, ends), 30, 30, "documents")
    found = measure(model, apart, load_tokenizer("bytes"), 1, 1)
    expected = 0.0
    for end, length in zip(ends, lengths, strict=True):
        ids = torch.tensor(tokens[end - length : end])[None]
        with torch.no_grad():
            logits = model(ids)[0, :-1]
        expected += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item() if length > 1 else 0
    assert found.tokens == 27 - 4
    assert found.nats == pytest.approx(expected, rel=1e-5)


def test_scores_do_not_depend_on_the_pieces(monkeypatch):
    model = model_of("neox")
    ids = torch.randint(0, 320, (3, 20), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1).masked_fill(torch.rand(3, 20) < 0.3, IGNORE)
    with torch.no_grad():
        logits = model(ids)
    expected = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="none")
    monkeypatch.setattr(perplexity, "LOGITS", 7 * 320)
    found = perplexity.score(model, ids, targets)
    torch.testing.assert_close(found.nats.float(), expected, atol=1e-5, rtol=0)
    assert torch.equal(found.greedy, logits.argmax(-1) == targets)


def test_the_standard_error_is_the_spread_of_the_mean():
    random = np.random.default_rng(0)

    def one(rows):
        counts = random.integers(1, 20, rows).astype(float)
        level = random.normal(3.0, 1.0, rows)  # tokens of a row have something in common
        return counts * level + random.normal(0, 1, rows) * np.sqrt(counts), counts

    means, errors = [], []
    for _ in range(2000):
        sums, counts = one(50)
        means.append(sums.sum() / counts.sum())
        errors.append(standard_error(sums, counts))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)
    assert standard_error(np.array([2.0]), np.array([1.0])) is None
    assert standard_error(np.array([2.0, 4.0]), np.array([1.0, 2.0])) == 0.0


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("limit", [None, 3])
def test_bytes_are_those_of_the_text(packing, limit, tmp_path):
    """The text is longer in bytes than in characters, and its end marks have none."""
    tokenizer = load_tokenizer(str(hf_folder(tmp_path)))
    # Each begins with a token of one byte.
    texts = ["Q naïve 日本語 🙂" * 9, "Q", "Q the quick brown fox" * 5]
    ids, lengths = tokenizer.pack(texts)
    windows = Windows(view_of(ids, np.cumsum(lengths)), 16, 16, packing)
    rows = limit or len(windows)
    found = measure(model_of(), windows, tokenizer, rows, 4)
    scored = [i for a, b in windows.scored(0, rows) for i in range(a, b)]
    if packing == "documents":
        scored = [i for i in scored if i not in np.cumsum(lengths)]
    assert found.tokens == len(scored)
    if limit is None:
        unscored = 1 if packing == "stream" else 3
        assert found.bytes == sum(len(text.encode()) for text in texts) - unscored
    else:
        # A cut character, at either end of a row, does not count.
        whole = sum(len(text.encode()) for text in texts)
        share = whole * len(scored) / len(ids)
        assert share / 2 < found.bytes < min(whole, 2 * share)
    assert (found.text_nats < found.nats) == (limit is None)
    assert found.bits_per_byte == found.text_nats / math.log(2) / found.bytes


def test_of_conversations_the_answers_alone_have_bytes(tmp_path):
    tokenizer = load_tokenizer(str(hf_folder(tmp_path)))
    parts = [tokenizer.pack([text])[0] for text in ("Q what is it?", "it is naïve", "Q", "日本語")]
    parts = [ids[ids != tokenizer.eos_id] for ids in parts]
    ids, is_answer = np.concatenate(parts).astype(np.int64), (0, 1, 0, 1)
    mask = np.repeat(np.array(is_answer, dtype=np.uint8), [len(one) for one in parts])
    shard = Shard(None, ids, np.array([len(ids)]), mask=Mask(mask, None))
    rows = Conversations(split([shard], 0.0, 320)[0], 32)
    found = measure(model_of(), rows, tokenizer, len(rows), 4)
    assert found.tokens == mask.sum()
    assert found.bytes == len("it is naïve".encode()) + len("日本語".encode())


def evaluated(capsys, *words):
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_evaluated_as_its_last_evaluation_was(tmp_path, capsys, monkeypatch):
    """Trained by two ranks that shared every matrix, measured by one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for n in range(40):
        (corpus / f"{n}.txt").write_text(f"def f{n}(x):\n    return x + {n}  # é\n" * 20)
    words = ["layout.tp=2", "model.n_kv_heads=2", "train.eval_every=4", "train.eval_batches=3"]
    words += ["data.source=corpus", "data.validation=0.1", "data.packing=documents", "data.seed=3"]
    assert main(["train", *TINY, *words, "data.cache=cache", "log.dir=runs", "log.name=a"]) == 0
    events = map(json.loads, (tmp_path / "runs/a/events.jsonl").read_text().splitlines())
    last = [event for event in events if event["event"] == "eval"][-1]

    found = evaluated(capsys, "runs/a", "--limit", 3 * 4)
    assert found["nats_per_token"] == pytest.approx(last["loss"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(last["loss"]), rel=1e-4)
    assert (found["seq_len"], found["stride"], found["packing"]) == (32, 32, "documents")
    step = evaluated(capsys, "runs/a/checkpoints/step-00000004", "--limit", 12, "--batch", 5)
    assert step["nats_per_token"] == pytest.approx(found["nats_per_token"], rel=1e-6)
    stream = evaluated(capsys, "runs/a", "--stride", 8, "--packing", "stream")
    assert stream["tokens"] == evaluated(capsys, "runs/a")["tokens"] + 3  # of 4 documents

    (corpus / "0.txt").write_text("changed")
    assert main(["eval", "runs/a"]) == 2
    assert "other data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "stride"), [("llama", 8), ("llama", 32), ("gemma2", 8), ("olmo3", 32)]
)
def test_a_folder_is_evaluated_as_transformers_does(kind, stride, tmp_path, capsys):
    """Attention of Gemma 2 and OLMo 3 sees seven tokens of 32 in every other layer."""
    transformers = pytest.importorskip("transformers")
    folder = hf_folder(tmp_path, kind)
    (tmp_path / "text.txt").write_text(TEXTS[0] + TEXTS[1])
    words = ["--source", tmp_path / "text.txt", "--cache", tmp_path / "cache"]
    found = evaluated(capsys, folder, *words, "--seq-len", 32, "--stride", stride)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(str(folder))
    ids = torch.tensor(tokenizer.pack([TEXTS[0] + TEXTS[1]])[0])
    total = count = 0
    for begin, end, first in guide(len(ids), 33, stride):
        labels = ids[begin:end].clone()
        labels[: first - begin] = -100
        with torch.no_grad():
            loss = theirs(ids[None, begin:end], labels=labels[None]).loss
        total, count = total + loss.item() * (end - first), count + end - first
    assert found["tokens"] == count == len(ids) - 1
    assert found["nats_per_token"] == pytest.approx(total / count, rel=1e-5)
    assert found["text"] == str(tmp_path / "text.txt")


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_each_row_begins_as_a_folders_tokenizer_begins_texts(packing, tmp_path, capsys):
    """Gemma's loss without BOS is many times as large."""
    transformers = pytest.importorskip("transformers")
    folder = hf_folder(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.save(str(folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXTS[1])
    words = ["--source", tmp_path / "text.txt", "--cache", tmp_path / "cache"]
    found = evaluated(capsys, folder, *words, "--seq-len", 20, "--packing", packing)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([*tokenizer(TEXTS[1])["input_ids"], tokenizer.eos_token_id])
    total = 0.0
    for start in range(0, len(ids) - 1, 20):
        row, bos = ids[start : start + 21], ids[:1]
        scored = len(row) - 1
        row = row if start == 0 else torch.cat([bos, row])
        with torch.no_grad():
            logits = theirs(row[None, :-1]).logits[0, -scored:]
        total += F.cross_entropy(logits, row[-scored:], reduction="sum").item()
    assert found["tokens"] == len(ids) - 1
    assert found["nats_per_token"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found["bytes"] == len(TEXTS[1].encode())


@pytest.mark.slow
def test_conversations_are_evaluated_whole_as_in_their_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    rows = [{"question": f"{n} " * 9, "answer": f"{n}" * 9} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data.format=chat", "data.packing=documents", "data.source=a.jsonl"]
    words += [f"data.tokenizer={CHAT}", "data.validation=0.4", "train.seq_len=90"]
    words += ["train.eval_every=4", "train.eval_batches=9", "model.vocab_size=320"]
    assert main(["train", *TINY, *words, "data.cache=cache", "log.dir=runs", "log.name=a"]) == 0
    events = map(json.loads, (tmp_path / "runs/a/events.jsonl").read_text().splitlines())
    last = [event for event in events if event["event"] == "eval"][-1]
    found = evaluated(capsys, "runs/a")
    assert found["nats_per_token"] == pytest.approx(last["loss"], rel=1e-5)
    given = evaluated(capsys, "runs/a", "--source", "a.jsonl", "--cache", "cache")
    assert given["tokens"] > 2 * found["tokens"]
    for more in (["--stride", "9"], ["--packing", "stream"]):
        assert main(["eval", "runs/a", *more]) == 2
        assert "conversations are read whole" in capsys.readouterr().err


def test_bf16_is_near(tmp_path, capsys):
    folder = hf_folder(tmp_path)
    (tmp_path / "text.txt").write_text(TEXTS[1])
    words = [folder, "--source", tmp_path / "text.txt", "--cache", tmp_path / "cache"]
    exact = evaluated(capsys, *words)
    assert exact["seq_len"] == 64  # the whole context
    near = evaluated(capsys, *words, "--precision", "bf16")
    assert near["nats_per_token"] != exact["nats_per_token"]
    assert near["nats_per_token"] == pytest.approx(exact["nats_per_token"], rel=0.02)


def test_a_table_for_people(tmp_path, capsys):
    folder = hf_folder(tmp_path)
    (tmp_path / "text.txt").write_text(TEXTS[0])
    words = ["--source", str(tmp_path / "text.txt"), "--cache", str(tmp_path / "cache")]
    assert main(["eval", str(folder), *words, "--limit", "2", "--seq-len", "16"]) == 0
    shown = capsys.readouterr().out
    for part in ("nats per token", "perplexity", "bits per byte", "32 tokens", "in 2 of "):
        assert part in shown.replace("\n ", "")


REFUSED = [
    (["--seq-len", "65"], "--seq-len 65 .* context of 64; nearest legal: 64"),
    (["--seq-len", "0"], "--seq-len 0 .* nearest legal: 1"),
    (["--seq-len", "8", "--stride", "9"], "--stride 9 .* the 8 tokens .* nearest legal: 8"),
    (["--stride", "0"], "--stride 0 .* nearest legal: 1"),
    (["--limit", "0"], "--limit 0 .* nearest legal: 1"),
    (["--batch", "0"], "--batch 0"),
    (["--source", "nowhere.txt"], "no such file or folder: nowhere.txt"),
    (["--tokenizer", "gpt3"], "no tokenizer at gpt3"),
    (["--device", "cuda"], "no GPU of NVIDIA or AMD is visible; nearest legal: cpu"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_is_refused(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = hf_folder(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "text.txt").write_text("some words " * 30)
    source = [] if "--source" in words else ["--source", "text"]
    assert main(["eval", str(folder), *words, *source, "--cache", "cache"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_folder_has_held_nothing_out(tmp_path, capsys):
    assert main(["eval", str(hf_folder(tmp_path))]) == 2
    assert "give --source" in capsys.readouterr().err


def test_a_blend_has_no_one_text_that_was_held_out(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"some words of {name} " * 200)
    blend = [f'data.source=["{tmp_path}/a.txt", "{tmp_path}/b.txt"]', "data.weights=[1, 2]"]
    job = SimpleNamespace(config=load_config(None, blend), cache=tmp_path / "cache")
    monkeypatch.setattr(text, "run_of", lambda folder: job)
    monkeypatch.setattr(text, "find_step", lambda folder: None)
    with pytest.raises(ConfigError, match=r"was trained on a blend, .* give --source"):
        text.held_out(tmp_path, 320)


def test_a_store_of_another_tokenizer(tmp_path, capsys):
    folder, run = hf_folder(tmp_path), write_run(tmp_path / "run")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    source = ["--source", str(tmp_path / "text.txt"), "--tokenizer", str(folder)]
    assert main(["data", "prepare", str(tmp_path / "store"), *source]) == 0
    assert main(["eval", str(run), "--source", str(tmp_path / "store")]) == 2
    assert "prepared with the tokenizer" in capsys.readouterr().err
    assert evaluated(capsys, folder, "--source", tmp_path / "store")["tokens"] > 0


def test_weights_that_have_diverged(tmp_path):
    model = model_of()
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    windows = Windows(view_of(np.arange(20)), 8, 8)
    with pytest.raises(CheckpointError, match="the weights have diverged"):
        measure(model, windows, load_tokenizer("bytes"), 2, 2)


def test_nothing_to_predict():
    windows = Windows(view_of(np.arange(6), [1, 2, 3, 4, 5, 6]), 4, 4, "documents")
    with pytest.raises(DataError, match="no document has a second"):
        measure(model_of(), windows, load_tokenizer("bytes"), len(windows), 2)
