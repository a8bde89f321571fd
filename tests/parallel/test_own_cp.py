"""A model of one's own over cp: every gradient as on one device, and what cannot be is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.parallel.data_parallel.gradients import local_shard
from meshwright.spec.training import Precision, TrainSpec
from ranks import ranks
from test_parallelize_parts import PLAN, foreign, gradients_agree

ROWS, SEQ = 2, 24


class Layer(nn.Module):
    """Attention, whose heads have a gain in common, and a product; `wrong` is what a test does."""

    def __init__(self, wrong=""):
        super().__init__()
        # A bias of keys has no gradient but rounding: it adds the same to all scores of a query.
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=n != 1) for n in range(4))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.conv = nn.Conv1d(16, 16, 2, padding=1) if wrong == "convolution" else None
        self.wrong = wrong

    def attend(self, x):
        projected = (project(x) for project in (self.q, self.k, self.v))
        q, k, v = (one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in projected)
        more = {"is_causal": True}
        if self.wrong == "mask":
            more = {"attn_mask": torch.ones(q.shape[2], q.shape[2]).tril().bool()}
        if self.wrong == "two-sided":
            more = {}
        if self.wrong == "dropout":
            more["dropout_p"] = 0.1 * self.training
        if self.wrong == "by hand":
            scores = (q @ k.mT / 2).masked_fill(
                ~torch.ones(q.shape[2], q.shape[2]).tril().bool(), -1e9
            )
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, scale=0.4, **more)
        return self.out((mixed * self.gain).transpose(1, 2).flatten(2))

    def forward(self, x):
        if self.wrong == "recomputed":
            x = x + checkpoint(self.attend, x, use_reentrant=False)
        elif self.wrong == "reentrant":
            x = x + checkpoint(self.attend, x, use_reentrant=True)
        else:
            x = x + self.attend(x)
        if self.conv is not None:
            x = x + self.conv(x.mT)[..., :-1].mT
        return x + self.down(torch.relu(self.up(x)))


class Own(nn.Module):
    """A GPT with learned positions, which it is given."""

    def __init__(self, wrong=""):
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Layer(wrong) for _ in range(2))
        self.head = nn.Linear(16, 32)
        self.wrong = wrong

    def forward(self, ids, positions, labels=None):
        if self.wrong == "numbers":
            positions = torch.arange(ids.shape[1])[None]
        x = self.words(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


OWN_PLAN = {f"layers.*.{name}": "column" for name in ("q", "k", "v", "up")}
OWN_PLAN |= {"layers.*.out": "row", "layers.*.down": "row"}


def own(wrong=""):
    torch.manual_seed(0)
    return Own(wrong)


def batch(rows=ROWS):
    torch.manual_seed(1)
    tokens = torch.randint(0, 32, (rows, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def summed(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def trained(world, make, layout, run, **more):
    """Return the model parallelised, with the gradients of its share of a batch, and it alone."""
    rows = ROWS * layout.dp
    inputs, targets = batch(rows)
    alone = make()
    (summed(run(alone, inputs, torch.arange(SEQ)[None]), targets) / targets.numel()).backward()
    model = mw.parallelize(make(), layout, mw.make_mesh(layout), **more)
    at = mw.positions(layout, SEQ)
    place = layout.mesh.data_rank(world.rank)
    mine = slice(place * ROWS, (place + 1) * ROWS)
    logits = run(model, inputs[mine][:, at], at[None])
    (summed(logits, targets[mine][:, at]) / targets.numel()).backward()
    return model, alone


def by_ids(model, inputs, positions):
    return model(inputs, positions)


def of_transformers(model, inputs, positions):
    return model(input_ids=inputs, position_ids=positions).logits


TWO = {
    "cp2": {},
    "zero3": {"zero": 3},
    "zero1": {"zero": 1},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective", "zero": 2},
}
FOUR = {
    "tp2": {"tp": 2},
    "tp2 zero3": {"tp": 2, "zero": 3},
    "dp2": {"dp_replicate": 2},
    "shard2": {"dp_shard": 2, "zero": 2},
    "cp4": {"cp": 4},
}


@pytest.mark.often(1)
@pytest.mark.parametrize("case", TWO)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@ranks(2)
def test_every_gradient_is_that_of_one_device(world, kind, case):
    layout = mw.Layout(**{"cp": 2, "cp_kind": kind, **TWO[case]})
    gradients_agree(*trained(world, own, layout, by_ids))


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@ranks(4)
def test_every_gradient_is_that_of_one_device_on_four_ranks(world, kind, case):
    layout = mw.Layout(**{"cp": 2, "cp_kind": kind, **FOUR[case]})
    gradients_agree(*trained(world, own, layout, by_ids, plan=OWN_PLAN))


def llama():
    pytest.importorskip("transformers")
    return foreign("Llama")


def qwen():
    return foreign("Qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@ranks(2)
def test_a_llama_of_transformers(world, kind):
    gradients_agree(
        *trained(world, llama, mw.Layout(cp=2, cp_kind=kind, recompute="full"), of_transformers)
    )


@pytest.mark.slow
@ranks(4)
def test_norms_of_heads_under_tp_and_cp(world):
    layout = mw.Layout(cp=2, tp=2, zero=3)
    gradients_agree(*trained(world, qwen, layout, of_transformers, plan=PLAN))


def one_head_of_keys():
    return foreign("Llama", num_key_value_heads=1)


@pytest.mark.slow
@ranks(4)
def test_keys_that_tp_leaves_whole_get_the_gradient_of_all_heads(world):
    plan = {name: how for name, how in PLAN.items() if name[-6] not in "kv"}
    layout = mw.Layout(cp=2, tp=2)
    gradients_agree(*trained(world, one_head_of_keys, layout, of_transformers, plan=plan))


@ranks(2)
def test_half_precision_is_no_difference(world):
    layout = mw.Layout(cp=2, zero=2)
    trained(world, llama, layout, of_transformers, train=TrainSpec(precision="bf16"))


REFUSED = {
    "mask": "layout.cp = 2 does not allow a mask",
    "two-sided": "layout.cp = 2 does not allow attention that is not causal",
    "dropout": r"layout.cp = 2 does not allow dropout \(0.1\) in attention",
    "numbers": "the queries of attention 1 differs by",
    "by hand": "calls F.scaled_dot_product_attention nowhere",
    "convolution": "the queries of attention 2 differs by",
    "reentrant": "use_reentrant=False",
}


@pytest.mark.often(5)
@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@ranks(2)
def test_what_would_be_another_model_is_refused(world, kind, wrong):
    with pytest.raises(ConfigError, match=REFUSED[wrong]):
        trained(world, lambda: own(wrong), mw.Layout(cp=2, cp_kind=kind), by_ids)


def zeroed(wrong=""):
    """Return a model whose branches begin at zero, each by its last layer."""
    model = own(wrong)
    for layer in model.layers:
        for last in (layer.out, layer.down, layer.conv):
            for parameter in () if last is None else last.parameters():
                nn.init.zeros_(parameter)
    return model


@ranks(2)
def test_branches_that_begin_at_zero_hide_nothing(world):
    with pytest.raises(ConfigError, match=REFUSED["convolution"]):
        trained(world, lambda: zeroed("convolution"), mw.Layout(cp=2), by_ids)


@pytest.mark.often(1)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks(2)
def test_branches_that_begin_at_zero_are_trained_from_there(world, zero, precision: Precision):
    train = TrainSpec(precision=precision)
    model, alone = trained(world, zeroed, mw.Layout(cp=2, zero=zero), by_ids, train=train)
    gradients_agree(model, alone, within=1e-5 if precision == "fp32" else 0.1)
    assert not any(local_shard(layer.down.weight.detach()).any() for layer in model.layers)


@ranks(2)
def test_a_recomputation_that_cannot_be_followed_is_refused(world):
    with pytest.raises(RuntimeError, match="A different number of tensors was saved"):
        trained(world, lambda: own("recomputed"), mw.Layout(cp=2), by_ids)


CUT_WRONGLY = {
    "not cut": (lambda at: torch.arange(SEQ), "every rank of cp = 2 was given the same tokens"),
    "other order": (
        lambda at: torch.arange(SEQ).chunk(2)[at[0] > 0],
        "positions are cut in another order than layout.cp_kind = ring has",
    ),
    "uneven": (lambda at: at[: len(at) - 2 * (at[0] > 0)], "rows x tokens of .* up to"),
    "odd": (lambda at: at[:-1], "ring context parallelism cuts the sequence into 4 equal chunks"),
}


@pytest.mark.parametrize("case", CUT_WRONGLY)
@ranks(2)
def test_rows_that_are_cut_otherwise_are_refused(world, case):
    layout = mw.Layout(cp=2)
    make, text = CUT_WRONGLY[case]
    at = make(mw.positions(layout, SEQ))
    model = mw.parallelize(own(), layout, mw.make_mesh(layout))
    with pytest.raises(ConfigError, match=text):
        model(batch()[0][:, at], at[None])


@ranks(2)
def test_a_loss_that_shifts_its_labels_is_refused(world):
    layout = mw.Layout(cp=2)
    at, (inputs, _) = mw.positions(layout, SEQ), batch()
    model = mw.parallelize(own(), layout, mw.make_mesh(layout))
    with pytest.raises(ConfigError, match="the loss that the model returns differs"):
        model(inputs[:, at], at[None], labels=inputs[:, at])


@ranks(2)
def test_masks_of_transformers(world):
    """Of positions with gaps it makes one where it keeps no cache, unless told that all count."""
    layout = mw.Layout(cp=2)
    at, (inputs, _) = mw.positions(layout, SEQ), batch()
    mine = {"input_ids": inputs[:, at], "position_ids": at[None], "use_cache": False}
    model = mw.parallelize(llama(), layout, mw.make_mesh(layout))
    # The last rank's two chunks are neighbours.
    texts = ("does not allow a mask.*attention_mask=torch.ones_like", "another rank was refused")
    with pytest.raises(ConfigError, match=texts[world.rank]):
        model(**mine)
    out = model(**mine, attention_mask=torch.ones_like(mine["input_ids"]))
    whole = llama()(input_ids=inputs).logits
    assert torch.allclose(out.logits, whole[:, at], atol=1e-5)


@pytest.mark.often(1)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@ranks(2)
def test_positions_of_transformers(world, kind):
    """They are given, and do not begin anew."""
    layout = mw.Layout(cp=2, cp_kind=kind)
    at, (inputs, _) = mw.positions(layout, SEQ), batch()
    model = mw.parallelize(llama(), layout, mw.make_mesh(layout))
    with pytest.raises(ConfigError, match="queries of attention 1 differs by"):
        model(input_ids=inputs[:, at])
    with pytest.raises(ConfigError, match="position_ids restart within a row"):
        model(input_ids=inputs[:, at], position_ids=(at % (SEQ // 2))[None])


@ranks(2)
def test_attention_of_torch_is_refused(world):
    layout = mw.Layout(cp=2)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2))
    with pytest.raises(ConfigError, match=r"the attention of 0\.self_attn, a torch nn\.Multihead"):
        mw.parallelize(model, layout, mw.make_mesh(layout))


@ranks(2)
def test_windows_shorter_than_the_row_are_refused(world):
    layout = mw.Layout(cp=2)
    at, (inputs, _) = mw.positions(layout, SEQ), batch()
    model = mw.parallelize(foreign("Mistral", sliding_window=16), layout, mw.make_mesh(layout))
    with pytest.raises(ConfigError, match="sliding_window = 16 is less than the row of 24 tokens"):
        model(input_ids=inputs[:, at], position_ids=at[None])


@ranks(2)
def test_heads_that_ulysses_cannot_share_are_refused(world):
    layout = mw.Layout(cp=2, cp_kind="ulysses")
    model = foreign("Llama", num_key_value_heads=1)
    model = mw.parallelize(model, layout, mw.make_mesh(layout))
    at, (inputs, _) = mw.positions(layout, SEQ), batch()
    with pytest.raises(
        ConfigError, match=r"must divide the 1 heads of keys .*layout.cp_kind = ring"
    ):
        model(input_ids=inputs[:, at], position_ids=at[None])
