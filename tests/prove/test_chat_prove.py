"""Losses of supervised tokens on any layout: as on one device, and as a plain transformers loop."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loops import CHAT, DATA, OPTIMIZER, STEPS, plain_steps, sampled
from loops import TRAIN as ROWS
from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.data import IGNORE
from meshwright.layout import Layout
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.matrix import matrix
from meshwright.prove.parity import prove_parity
from meshwright.runtime.proofs.proof import prove_cases
from meshwright.spec.lora import Lora
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks
from runs import clean_environ

MODEL = model_spec(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=72, family="llama"
)
TRAIN = TrainSpec(batch=8, seq_len=32, seed=3)


def case_of(label, precision="fp32", lora=None):
    train = TRAIN.model_copy(update={"precision": precision})
    model = MODEL.model_copy(update={"lora": lora})
    return Case(model, train, Layout.parse(label), packed=True, chat=True)


def proven(world, label, precision="fp32", lora=None):
    case = case_of(label, precision, lora)
    return prove_parity(case, open_groups(case.layout, world), world)


def test_half_of_the_rows_have_nothing_that_is_trained():
    for step in range(4):
        counts = (make_batch(case_of("dp2 mb1"), step).targets != IGNORE).sum(1)
        assert counts[:4].tolist() == [0] * 4
        assert len(set(counts[4:].tolist())) > 1


@given(
    rows=st.integers(1, 6),
    seq=st.integers(2, 48),
    seed=st.integers(0, 999),
    packed=st.booleans(),
    chat=st.booleans(),
)
def test_every_batch_has_a_target(rows, seq, seed, packed, chat):
    """A document's border or a span could fall on the only one: all gradients were zero."""
    train = TRAIN.model_copy(update={"batch": rows, "seq_len": seq, "seed": seed})
    case = Case(MODEL, train, Layout.parse("dp1 mb1"), packed=packed, chat=chat)
    batch = make_batch(case, 0)
    assert (batch.targets != IGNORE).any()
    if packed:  # what remains is predicted within its document
        rows_of, places = (batch.targets[:, :-1] != IGNORE).nonzero(as_tuple=True)
        assert (batch.segments[rows_of, places] == batch.segments[rows_of, places + 1]).all()


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("label", "precision", "lora"),
    [
        ("dp2 mb1", "fp32", None),
        ("shard2 zero2 mb2", "bf16", None),
        ("tp2 sp mb2", "fp32", None),
        ("tp2 sp mb2", "fp32", Lora(rank=4, alpha=6.0)),
        ("cp2 mb4", "fp32", None),
        ("pp2 1f1b mb1", "fp32", None),
    ],
)
def test_turns_are_proven(label, precision, lora):
    for verdicts in on_ranks(2, proven, label=label, precision=precision, lora=lora):
        assert all(verdict.passed for verdict in verdicts), verdicts


def chats(world, count):
    """Return cases of a table with turns in place of whole rows, spread over the table."""
    legal = [
        replace(case, packed=case.layout.cp == 1 or case.packed, chat=True)
        for case in matrix(world)
        if case.refused is None and case.layout.offload == "none" and not case.model.experts
    ]
    return legal[:: max(1, len(legal) // count)]


def test_the_table_of_turns_has_every_axis():
    layouts = [case.layout for case in chats(4, 24)]
    assert len(set(layouts)) >= 20
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.cp_kind for layout in layouts if layout.cp > 1} == {"ring", "ulysses"}
    assert {layout.sp for layout in layouts if layout.tp > 1} == {False, True}
    assert len({layout.schedule for layout in layouts if layout.pp > 1}) >= 5


@pytest.mark.slow
def test_turns_are_proven_on_many_layouts():
    outcomes = prove_cases(chats(4, 24), clean_environ(), lambda outcome: None)
    assert len(outcomes) >= 20
    assert [outcome.failed_claims for outcome in outcomes if outcome.failed_claims] == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model of transformers and what its own loop of one process makes of ten steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512))
    model.save_pretrained(folder / "hf")
    found = plain_steps(model, sampled(folder))
    return folder, found, {name: p.detach() for name, p in model.named_parameters()}


def overrides(folder):
    return [
        *(f"model.init_from={folder / 'hf'}", "data.format=chat", "data.validation=0"),
        *(f"data.source={DATA.source}", f"data.tokenizer={DATA.tokenizer}"),
        *(f"data.cache={folder / 'cache'}", f"log.dir={folder / 'runs'}", "cluster.device=cpu"),
        *(f"train.steps={STEPS}", f"train.batch={ROWS.batch}", f"train.seq_len={ROWS.seq_len}"),
        *(f"train.clip_norm={ROWS.clip_norm}", f"optimizer.lr={OPTIMIZER.lr}"),
        *(f"optimizer.weight_decay={OPTIMIZER.weight_decay}", "optimizer.schedule=constant"),
        *("optimizer.warmup_steps=0", "train.compile=false"),
    ]


@pytest.mark.slow
def test_a_run_equals_a_plain_transformers_loop(plain, capsys):
    from safetensors.torch import load_file

    folder, expected, weights = plain
    words = ["layout.dp_replicate=2", "layout.microbatch=1", "log.name=run"]
    assert main(["train", *overrides(folder), *words]) == 0
    run = folder / "runs" / "run"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "step"]
    assert [event["loss"] for event in found] == pytest.approx(expected.losses, abs=1e-5)
    assert [event["grad_norm"] for event in found] == pytest.approx(expected.norms, rel=1e-5)
    assert main(["checkpoint", "export-hf", str(run), str(folder / "out")]) == 0
    for key, ours in load_file(folder / "out" / "model.safetensors").items():
        assert (ours - weights[key]).abs().max() < 1e-5, key


@pytest.mark.slow  # 120 steps; a run that equals transformers' own loop is above
def test_the_example_learns_to_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(CHAT.parent)
    short = ["train.steps=120", "train.eval_every=120", "log.name=chat"]
    assert main(["train", "examples/chat.toml", *short]) == 0
    lines = (tmp_path / "runs/chat/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (start,) = (event for event in events if event["event"] == "start")
    assert start["rows"]["cut"] == 0
    (held,) = (event for event in events if event["event"] == "eval")
    assert held["loss"] < 0.4  # nats a trained token; an even guess is 5.6, single bytes 3.2
    capsys.readouterr()
    words = [
        "generate",
        "runs/chat",
        "--chat",
        "--prompt",
        "Opposite of wet?",
        "--temperature",
        "0",
    ]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["text"].startswith("It is ")
    assert told["text"].endswith(", my friend!")
    assert (tmp_path / "runs/chat/report/index.html").stat().st_size > 10_000
    assert main(["checkpoint", "export-hf", "runs/chat", "answers"]) == 0
    capsys.readouterr()
    assert main(["generate", "answers", *words[2:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == told["text"]
    assert main([*words, "--system", "Be kind."]) == 0
    assert "my friend!" in capsys.readouterr().out
    assert main(["generate", "runs/chat", "--chat", "--prompt", "a<|im_end|>"]) == 2
    assert "quotes the special token" in capsys.readouterr().err
    assert main(["generate", "runs/chat", "--system", "x", "--prompt", "a"]) == 2
