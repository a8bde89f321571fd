import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.cli.main import main
from meshwright.data import open_data
from meshwright.runtime.peers.catalogue import PEERS, PeerSizes, ranks_of
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, Task
from meshwright.runtime.peers.llama import Llama
from meshwright.runtime.peers.match import Entrant, line_up, random_tokens, table
from meshwright.runtime.peers.native import train
from meshwright.spec.training import DataSpec
from ranks import on_ranks

TINY = PeerSizes(vocab=64, dim=16, layers=2, heads=2, ffn=32, seq=16, batch=8)


STEPS = 4


def losses(world, mode, microbatch):
    torch.manual_seed(0)
    return train(Task(mode, STEPS, microbatch, TINY)).losses


def plain_losses(mode):
    """The losses of one model on one device, all of a step's rows at once."""

    def drawn(layers):
        torch.manual_seed(0)
        return Llama(TINY, layers=layers)

    # Ranks of a pipeline draw their stages each by itself.
    of_ranks = [range(1), range(1, 2)] if mode == "pp" else [range(TINY.layers)]
    net = nn.Sequential(*map(drawn, of_ranks))
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    found = []
    for step in range(STEPS):
        rows = torch.randint(
            *(0, TINY.vocab, (TINY.batch, TINY.seq + 1)),
            generator=torch.Generator().manual_seed(step),
        )
        loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.often(1)
@pytest.mark.parametrize("mode", PEERS["native"].modes)
def test_a_native_mode_computes_what_one_device_does(mode):
    found = on_ranks(ranks_of(mode), losses, mode=mode, microbatch=2)[0]
    assert found == pytest.approx(plain_losses(mode), abs=1e-3 if mode == "bf16" else 1e-5)


def test_the_ratio_is_to_the_best_peer_of_the_mode():
    times = {"meshwright": [2.0, 1.0, 2.0], "native": [4.0], "deepspeed": [1.0], "litgpt": []}
    entrants = [Entrant(name, "ddp", 2, seconds=s, peaks=[1]) for name, s in times.items()]
    rows = {row["system"]: row for row in table(entrants, 100)}
    assert rows["meshwright"]["tokens_per_s"] == 50
    assert rows["meshwright"]["ratio"] == 0.5
    assert rows["native"]["ratio"] is None
    assert "litgpt" not in rows


def test_peers_enter_the_modes_that_they_have():
    entered = {(e.mode, e.system) for e in line_up(["tp", "ring"], ["meshwright", "native"], None)}
    assert entered == {("tp", "meshwright"), ("tp", "native"), ("ring", "meshwright")}


def test_meshwright_reads_the_random_tokens(tmp_path):
    path = random_tokens(tmp_path, TINY, steps=6)
    spec = DataSpec(source=str(path), tokenizer=str(tmp_path / "tokenizer.json"))
    data = open_data(spec, tmp_path / "cache", TINY.vocab)
    assert data.sampler("train", TINY.seq, TINY.batch).samples >= 6 * TINY.batch
    assert data.vocab_size == TINY.vocab


SMALL = [
    *("model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2"),
    *("model.ffn_dim=64", "model.vocab_size=300", "train.batch=4", "train.seq_len=32"),
]


@pytest.mark.slow  # every mode's losses, the table and the line-up are tested above
def test_peers_run_side_by_side(tmp_path, capsys):
    out, earlier = tmp_path / "peers.json", tmp_path / "earlier.json"
    chosen = {"mode": "single", "system": "native", "microbatch": 2}
    earlier.write_text(json.dumps({"rows": [chosen]}))  # what a sweep would find again
    words = [
        *("--microbatches", str(earlier)),
        "--modes",
        "single",
        "ddp",
        "--rounds",
        "1",
        "--steps",
        "3",
        "--json",
        "--out",
        str(out),
    ]
    systems = ["--systems", "meshwright", "native", "olmo"]
    assert main(["bench", "peers", *SMALL, *words, *systems]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"] == json.loads(out.read_text())["rows"]
    ran = [(row["mode"], row["system"]) for row in document["rows"]]
    assert ran == [(m, s) for m in ("single", "ddp") for s in ("meshwright", "native")]
    assert all(row["steps"] == 1 and row["tokens_per_s"] > 0 for row in document["rows"])
    assert all(row["peak_bytes"] > 50 << 20 for row in document["rows"])
    swept = {(r["mode"], r["microbatch"]): r["sweep_seconds"] for r in document["rows"][1::2]}
    assert swept.pop(("single", 2)) == {}
    assert set(*swept.values()) == {"1", "2"}
    assert document["sizes"]["dim"] == 32
    assert document["not_installed"] == ["olmo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.n_kv_heads=1"], "a plain Llama in every peer: model.n_kv_heads = 1"),
        (["model.family=neox"], "a plain Llama in every peer: model.family = neox"),
        (["train.batch=6"], "train.batch = 6 must be a multiple of 4"),
        (["--steps", "2"], "--steps 2 --rounds 3"),
        (["--peers-python", "/nowhere/python"], "--peers-python /nowhere/python"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message, capsys):
    assert main(["bench", "peers", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
