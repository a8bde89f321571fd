"""Losses of supervised tokens on any layout: as on one device, and as a plain transformers loop."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from meshwright.cli import main
from meshwright.data import IGNORE, open_data
from meshwright.execute.groups import open_groups
from meshwright.launch.proof import prove_cases
from meshwright.layout import Layout
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.matrix import matrix
from meshwright.prove.parity import prove_parity
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks
from runs import clean_environ

CHAT = Path(__file__).parent.parent / "examples" / "chat"
MODEL = model_spec(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=72, family="llama"
)
TRAIN = TrainSpec(batch=8, seq_len=32, seed=3)
STEPS = 20


def case_of(label, precision="fp32"):
    train = TRAIN.model_copy(update={"precision": precision})
    return Case(MODEL, train, Layout.parse(label), packed=True, chat=True)


def proven(world, label, precision="fp32"):
    case = case_of(label, precision)
    return prove_parity(case, open_groups(case.layout, world), world)


def test_half_of_the_rows_have_nothing_that_is_trained():
    for step in range(4):
        counts = (make_batch(case_of("dp2 mb1"), step).targets != IGNORE).sum(1)
        assert counts[:4].tolist() == [0] * 4
        assert len(set(counts[4:].tolist())) > 1


@pytest.mark.parametrize(
    ("label", "precision"),
    [
        ("dp2 mb1", "fp32"),
        ("shard2 zero2 mb2", "bf16"),
        ("tp2 sp mb2", "fp32"),
        ("cp2 mb4", "fp32"),
        ("pp2 1f1b mb1", "fp32"),
    ],
)
def test_turns_are_proven(label, precision):
    for verdicts in on_ranks(2, proven, label=label, precision=precision):
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
    """A model of transformers and what its own loop of one process makes of 20 steps."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512))
    model.save_pretrained(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(str(CHAT / "tokenizer"))
    labels = {}
    for line in (CHAT / "conversations.jsonl").read_text().splitlines():
        found = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        ids = found["input_ids"]
        marked = [i if m else IGNORE for i, m in zip(ids, found["assistant_masks"], strict=True)]
        labels[tuple(ids)] = labels[tuple(ids[:-1])] = (ids, marked)

    config = load_config(None, overrides(folder))
    sampler = open_data(config.data, folder / "cache").sampler("train", 512, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, (0.9, 0.95), 1e-8, 0.0)
    losses, norms = [], []
    for step in range(STEPS):
        rows, total, count = sampler.rows(step), 0.0, 0
        for inputs, of in zip(rows.inputs, rows.segments, strict=True):
            for number in range(of.max() + 1):
                key = tuple(inputs[of == number].tolist())
                if key not in labels:  # what fills a row
                    assert not any(key)
                    continue
                ids, marked = (torch.tensor([values]) for values in labels[key])
                logits = model(ids).logits[0, :-1]
                total += functional.cross_entropy(logits, marked[0, 1:], reduction="sum")
                count += int((marked[0, 1:] != IGNORE).sum())
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        losses.append(float(total.detach()) / count)
        optimizer.step()
    return folder, losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def overrides(folder):
    return [
        *(f"model.init_from={folder / 'hf'}", "data.format=chat", "data.validation=0"),
        *(f"data.source={CHAT / 'conversations.jsonl'}", f"data.tokenizer={CHAT / 'tokenizer'}"),
        *(f"data.cache={folder / 'cache'}", f"log.dir={folder / 'runs'}", "cluster.device=cpu"),
        *(f"train.steps={STEPS}", "train.batch=4", "train.seq_len=512", "train.clip_norm=0"),
        *("optimizer.lr=1e-4", "optimizer.schedule=constant", "optimizer.warmup_steps=0"),
        *("optimizer.weight_decay=0", "optimizer.betas=[0.9,0.95]", "train.compile=false"),
    ]


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate=2 microbatch=1",
        "tp=2 sp=true microbatch=2",
        pytest.param("dp_shard=2 zero=3 microbatch=1", marks=pytest.mark.slow),
        pytest.param("cp=2 microbatch=2", marks=pytest.mark.slow),
        pytest.param("pp=2 microbatch=1", marks=pytest.mark.slow),
    ],
)
def test_runs_equal_a_plain_transformers_loop(plain, layout, capsys):
    from safetensors.torch import load_file

    folder, losses, norms, weights = plain
    name = layout.replace(" ", "-")
    words = [f"layout.{word}" for word in layout.split()]
    assert main(["train", *overrides(folder), *words, f"log.name={name}"]) == 0
    run = folder / "runs" / name
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "step"]
    assert [event["loss"] for event in found] == pytest.approx(losses, abs=1e-5)
    assert [event["grad_norm"] for event in found] == pytest.approx(norms, rel=1e-5)
    assert main(["checkpoint", "export-hf", str(run), str(folder / name)]) == 0
    for key, ours in load_file(folder / name / "model.safetensors").items():
        assert (ours - weights[key]).abs().max() < 1e-5, key


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
    assert main([*words, "--system", "Be kind."]) == 0
    assert "my friend!" in capsys.readouterr().out
    assert main(["generate", "runs/chat", "--chat", "--prompt", "a<|im_end|>"]) == 2
    assert "quotes the special token" in capsys.readouterr().err
    assert main(["generate", "runs/chat", "--system", "x", "--prompt", "a"]) == 2
