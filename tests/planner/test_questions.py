"""What the planner answers beside its ranking, each answer held against trying all layouts."""

import json
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.cost.price import price, worst_estimate, worst_memory
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken
from meshwright.planner.lightest import lightest, lightest_of, with_train
from meshwright.planner.plan import cost_inputs_of
from meshwright.planner.questions import (
    cheapest,
    fewest_devices,
    fine_tunings,
    largest_batches,
    longest_context,
    on_devices,
    sizes_up_to,
)
from meshwright.planner.ways_to_fit import ways_to_fit
from meshwright.spec.lora import Lora
from meshwright.spec.resolve import model_spec
from runs import TINY
from test_search import everything, setting

SEVEN = model_spec(preset="llama-2-7b")
A40S = setting(SEVEN, 8, "a40", batch=128, seq_len=4096)


def fits(one, label, margin=0.05):
    found = worst_memory(one, Layout.parse(label))
    return found.total <= found.limit * (1 - margin)


@pytest.mark.often(1)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_lightest_of_all_layouts_is_found(devices):
    one = setting(devices=devices)
    layouts = [
        layout
        for layout in everything(one, devices)
        if layout.offload == "none" and layout.recompute == "full"
    ]
    least = min(worst_estimate(one, layout).total for layout in layouts)
    found = lightest(one, devices)
    assert found.bytes == pytest.approx(worst_estimate(one, found.layout).total)
    # Schedules that the search leaves out, such as one microbatch at a time, may hold less.
    assert least <= found.bytes <= 1.1 * least
    assert broken(one.model, one.train, found.layout) is None


def test_the_fewest_devices():
    assert sizes_up_to(A40S.cluster, 40) == [1, 2, 4, 8, 16, 24, 32, 40]
    fewest, found = fewest_devices(A40S, 8)
    assert found.layout.world == fewest
    assert fewest == 4
    for count, is_enough in ((fewest, True), (fewest // 2, False)):
        tried = replace(A40S, cluster=on_devices(A40S.cluster, count))
        light = lightest(tried, count)
        assert (light.bytes <= 0.95 * 48 * 2**30) is is_enough
    assert fewest_devices(A40S, 2) is None


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not():
    found = largest_batches(A40S, 8)
    assert [one.recompute for one in found if one.at_speed] == ["none", "selective", "full"]
    assert [one.at_speed for one in found][:3] == [True] * 3
    for one in found:
        layout = one.prediction.layout
        assert one.sequences == layout.dp * layout.microbatch
        own = with_train(A40S, batch=one.batch)
        assert broken(own.model, own.train, layout) is None
        assert fits(own, layout.label)
        count = one.batch // one.sequences
        more = layout.model_copy(update={"microbatch": layout.microbatch + 1, "zero": 0})
        more = more.model_copy(update={"dp_replicate": layout.dp, "dp_shard": 1})
        assert lightest_of(own, more, count).bytes > 0.95 * 48 * 2**30
    most = max(one.sequences for one in found)
    assert found[-1].sequences == most
    assert largest_batches(A40S, 8) == found


def test_the_longest_context_is_found_where_the_closed_form_takes_too_much_for_it():
    """Its estimate says that a million tokens fit, which no exact layout does."""
    words = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm"]
    one = cost_inputs_of(mw.load_config(overrides=words))
    length, found = longest_context(one, 8)
    assert length >= 1 << 19
    assert found.memory.total <= 0.95 * found.memory.limit


@pytest.mark.slow
def test_the_longest_context_fits_and_the_next_length_does_not():
    one = with_train(A40S, batch=8)
    length, found = longest_context(one, 8)
    assert found.memory.total <= 0.95 * found.memory.limit
    assert found.tokens == 8 * length
    octave = 1 << (length.bit_length() - 1)
    longer = with_train(one, seq_len=length + octave // 8)
    assert worst_memory(longer, lightest(longer, 8).layout).total > 0.95 * 48 * 2**30
    tiny = replace(one.cluster, device=replace(one.cluster.device, memory=10**9))
    assert longest_context(replace(one, cluster=tiny), 8) is None


@pytest.mark.slow
def test_the_cheapest_token():
    prices = {"a40": 1.0, "h100-sxm": 4.0}
    found = cheapest(A40S, prices, 8)
    costs = [one.cost for one in found]
    assert costs == sorted(costs)
    assert {one.device for one in found} == {"a40", "h100-sxm"}
    for one in found:
        hours = 1e6 / one.prediction.tokens_per_s / 3600
        assert one.cost == pytest.approx(hours * one.devices * prices[one.device])
        assert one.prediction.layout.world == one.devices
    # A price twice as high doubles the cost of that kind alone.
    dearer = {(o.device, o.devices): o.cost for o in cheapest(A40S, {**prices, "a40": 2.0}, 8)}
    for one in found:
        times = 2 if one.device == "a40" else 1
        assert dearer[one.device, one.devices] == pytest.approx(times * one.cost)
    with pytest.raises(ConfigError, match="--price"):
        cheapest(A40S, {}, 8)


@pytest.mark.slow
def test_what_can_be_fine_tuned():
    """Adapters fit where all weights need offload, and leave room for longer sequences."""
    one = with_train(replace(A40S, cluster=on_devices(A40S.cluster, 2)), batch=8)
    whole, adapters, is_nf4 = fine_tunings(one, 2)
    assert (whole.trained, whole.longest) == ("all weights", None)
    assert whole.prediction.layout.offload == "optimizer"
    assert adapters.trained == "adapters of rank 16"
    assert adapters.prediction.memory.total <= 0.95 * 48 * 2**30
    assert adapters.prediction.layout.offload == "none"
    assert adapters.longest[0] >= 4096
    assert is_nf4.trained == "adapters of rank 16, 4-bit"
    assert is_nf4.prediction.layout.zero < 3
    assert is_nf4.prediction.memory.total <= 0.95 * 48 * 2**30
    assert is_nf4.longest[0] > adapters.longest[0]
    # Those of the model itself, and of what a family stores layer by layer.
    lora = Lora(rank=4, alpha=8.0, targets=("q_proj",))
    adapted = replace(one, model=one.model.model_copy(update={"lora": lora}))
    whole, adapters, _ = fine_tunings(adapted, 2)
    assert adapters.trained == "adapters of rank 4"
    assert whole.prediction.memory.total > adapters.prediction.memory.total
    neox = model_spec(family="neox", dim=512, n_layers=2, n_heads=8, vocab_size=512)
    whole, adapters, _ = fine_tunings(replace(one, model=neox), 2)
    assert (adapters.refused, adapters.prediction is None) == (None, False)
    mixture = model_spec(family="mixtral", dim=512, n_layers=2, n_heads=8, experts=4, top_k=2)
    whole, adapters, _ = fine_tunings(replace(one, model=mixture), 2)
    assert (whole.prediction is None, adapters.prediction is None, adapters.refused) == (
        False,
        False,
        None,
    )


@pytest.mark.often(2)
@pytest.mark.parametrize("label", ["dp8 mb4", "shard8 zero3 mb16", "shard8 zero3 mb2", "tp8 mb64"])
def test_what_helps_after_an_out_of_memory(label):
    layout = Layout.parse(label)
    now, found = ways_to_fit(A40S, layout)
    assert found
    assert not now.memory.fits
    own = price(A40S, layout)
    shorter = [one for one in found if one.text.startswith("train.seq_len")]
    assert found[len(found) - len(shorter) :] == shorter
    costs = [one.slower for one in found[: len(found) - len(shorter)]]
    assert costs == sorted(costs)
    for one in found:
        assert one.prediction.memory.total <= 0.95 * one.prediction.memory.limit
        assert one.saved == pytest.approx(own.memory.total - one.prediction.memory.total)
        rate = one.prediction.tokens_per_s / one.prediction.devices
        assert one.slower == pytest.approx(own.tokens_per_s / own.devices / rate - 1)
    assert ways_to_fit(A40S, layout) == (now, found)


def test_the_smallest_step_that_fits_is_named():
    _, found = ways_to_fit(A40S, Layout.parse("shard8 zero3 mb16 recompute-selective"))
    sizes = [one for one in found if one.text.startswith("layout.microbatch=")]
    singles = [one for one in sizes if " and " not in one.text]
    (step,) = singles
    size = step.prediction.layout.microbatch
    assert fits(A40S, f"shard8 zero3 mb{size} recompute-selective")
    assert not fits(A40S, f"shard8 zero3 mb{2 * size} recompute-selective")


def test_a_layout_that_should_fit_has_to_save_the_margin():
    layout = Layout.parse("shard8 zero3 mb1 recompute-full")
    now, found = ways_to_fit(A40S, layout)
    assert now.memory.fits
    assert found
    assert all(one.saved >= 0.05 * now.memory.total for one in found)


WORDS = [
    *("model.preset=llama-2-7b", "cluster.preset=a40", "train.precision=bf16"),
    *("train.batch=128", "train.seq_len=4096"),
]
ASKED = ("--fewest", "--largest-batch", "--longest-context", "--cheapest")
TWO = (*WORDS, "train.batch=8", "cluster.devices_per_node=2")


def run(capsys, *words):
    code = main(list(words))
    return code, capsys.readouterr()


@pytest.mark.slow
def test_questions_on_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out = run(capsys, "plan", *WORDS, "--top", "2", *ASKED, "--price", "a40=1")
    assert code == 0
    for words in (
        "fewest devices that fit without offload: 4",
        "largest batch at once",
        "longest context with train.batch = 128",
        "cost of a million tokens",
    ):
        assert words in out.out
    assert out.out.count("answered in") == 4
    assert max(map(len, out.out.splitlines())) <= 80
    code, out = run(capsys, "plan", *WORDS, "cluster.price=1", *ASKED, "--json")
    found = json.loads(out.out)["answers"]
    assert found["fewest_devices"]["devices"] == 4
    assert found["fewest_devices"]["step_time_s"] > 0
    assert found["largest_batch"][0]["sequences_at_once"] > 1
    assert found["longest_context"]["seq_len"] > 4096
    assert found["cheapest"][0]["price_per_hour"] == 1


@pytest.mark.slow
def test_fine_tuning_on_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out = run(capsys, "plan", *TWO, "--top", "2", "--fine-tune")
    assert code == 0
    assert "fine-tuning 8 sequences of 4096 tokens" in out.out
    assert "adapters of rank" in out.out
    assert max(map(len, out.out.splitlines())) <= 80
    code, out = run(capsys, "plan", *TWO, "--fine-tune", "--json")
    whole, adapters, is_nf4 = json.loads(out.out)["answers"]["fine_tuning"]
    assert whole["longest"] is None
    assert adapters["longest"]["seq_len"] <= is_nf4["longest"]["seq_len"]
    assert adapters["fastest"]["tokens_per_s"] > whole["fastest"]["tokens_per_s"]


def test_questions_from_python():
    words = ["model.preset=llama-3.2-1b", *WORDS[1:3], "train.batch=16", "train.seq_len=4096"]
    made = mw.plan(mw.load_config(overrides=[*words, "cluster.devices_per_node=2"]), 1, margin=0.1)
    two = setting(model_spec(preset="llama-3.2-1b"), 2, "a40", batch=16, seq_len=4096)
    assert made.fewest_devices() == fewest_devices(two, 2, 0.1) != None  # noqa: E711
    assert made.largest_batches() == largest_batches(two, 2, 0.1) != []
    assert made.longest_context() == longest_context(two, 2, 0.1) != None  # noqa: E711
    assert made.cheapest({"a40": 1.0}) == cheapest(two, {"a40": 1.0}, 2, 0.1) != []


@pytest.mark.slow
def test_fine_tuning_from_python():
    made = mw.plan(mw.load_config(overrides=TWO), top=1, margin=0.1)
    two = with_train(replace(A40S, cluster=on_devices(A40S.cluster, 2)), batch=8)
    assert made.fine_tunings() == fine_tunings(two, 2, 0.1)


def test_after_an_out_of_memory_on_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out = run(capsys, "plan", *WORDS, "--after-oom", "dp8 mb4")
    assert code == 0
    assert "what fits, the cheapest in time first" in out.out
    assert max(map(len, out.out.splitlines())) <= 80
    code, out = run(capsys, "plan", *WORDS, "--after-oom", "dp8 mb4", "--json")
    found = json.loads(out.out)
    assert found["ran_out"]["fits"] is False
    assert all(one["saved_bytes"] > 0 for one in found["fits"])
    code, out = run(capsys, "plan", *WORDS, "cluster.memory=1GiB", "--after-oom", "dp8 mb4")
    assert code == 1
    assert "no change" in out.out


@pytest.mark.often(3)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cheapest"], "cluster.price"),
        (["--price", "a40=1"], "--price is for --cheapest"),
        (["--cheapest", "--price", "a40"], "not of the form"),
        (["--cheapest", "--price", "a40=-1"], "above 0"),
        (["--cheapest", "--price", "a41=1"], "a40"),
        (["--after-oom", "dp8 mb3"], "must divide"),
        (["--after-oom", "tests"], "unknown word"),
    ],
)
def test_what_is_asked_wrongly_is_refused(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out = run(capsys, "plan", *WORDS, *words)
    assert code == 2
    assert message in out.err


def test_a_saved_plan_is_trained_and_only_as_it_was_planned(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = str(tmp_path / "plan.json")
    assert main(["plan", *TINY, "train.steps=2", "--save", plan]) == 0
    saved = json.loads((tmp_path / "plan.json").read_text())
    capsys.readouterr()
    for words, message in (
        (["model.dim=64"], "model.dim = 64, planned with 32"),
        (["layout.microbatch=1", "train.batch=2"], "train.batch = 2, planned with 4"),
        (["--resume", "runs/latest"], "give one of them"),
    ):
        code, out = run(capsys, "train", "--plan", plan, *words)
        assert (code, message in out.err) == (2, True), out.err
    code, out = run(capsys, "train", "--plan", plan, "train.steps=1", "--json")
    assert code == 0, out.err
    folder = tmp_path / json.loads(out.out)["run"]
    made = json.loads((folder / "plan.json").read_text())
    assert made["layout"] == saved["layout"]
    origins = json.loads((folder / "provenance.json").read_text())
    assert origins["layout.tp"] == origins["layout.zero"] == "plan"
    assert origins["train.steps"] == "override train.steps=1"
    # What a run can do after an out-of-memory of its own layout
    code, out = run(capsys, "plan", "--after-oom", str(folder), "--json")
    assert json.loads(out.out)["ran_out"]["layout"] == made["layout"]


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_what_is_no_plan_is_refused(capsys, tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    code, out = run(capsys, "train", "--plan", str(path))
    assert code == 2
    assert "plan.json" in out.err


def test_auto_keeps_what_is_given_and_names_the_plan(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "layout.auto=true", "layout.tp=2", "model.n_kv_heads=2"]
    code, out = run(capsys, "config", "show", *words, "--json")
    assert code == 0, out.err
    shown = json.loads(out.out)
    assert shown["layout"]["tp"] == {"value": 2, "origin": "override layout.tp=2"}
    assert shown["layout"]["zero"]["origin"] == "plan"
    assert shown["layout"]["auto"] == {"value": False, "origin": "plan"}
    assert shown["resolved_layout"]["tp"] == 2
    config = mw.load_config(overrides=[*TINY, "layout.auto=true", "cluster.devices_per_node=2"])
    made = mw.plan(config, top=1, local_devices=2)
    code, out = run(capsys, "config", "show", *TINY, "layout.auto=true", "--json")
    assert json.loads(out.out)["resolved_layout"] == made.best.layout.model_dump()
    code, out = run(capsys, "train", *words, "train.batch=3", "layout.microbatch=2")
    assert code == 2
    assert "layout.microbatch = 2" in out.err
    code, out = run(capsys, "train", *TINY, "layout.auto=true", "cluster.memory=1KiB")
    assert code == 2
    assert "no layout" in out.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.precision=fp16"], "requires train.precision = bf16, but it is fp16"),
        (["lora.rank=8"], "train.fp8 = true has no adapters"),
        (["cluster.preset=a100-80gb"], "a100-80gb has no float8 matmuls"),
    ],
)
def test_a_plan_with_float8_that_cannot_be_is_refused_by_its_rule(words, told, capsys):
    plan = ["plan", "model.preset=llama-3.2-1b", "cluster.preset=h100-sxm", "train.fp8=true"]
    assert main([*plan, *words]) == 2
    assert told in capsys.readouterr().err


def test_float8_is_priced_by_its_peak(capsys):
    words = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", "--top", "1", "--json"]
    found = []
    for is_fp8 in ("false", "true"):
        assert main(["plan", *words, f"train.fp8={is_fp8}", "layout.dp_replicate=1"]) == 0
        found.append(json.loads(capsys.readouterr().out)["ledger"]["step_time_s"])
    assert 0.7 < found[1] / found[0] < 0.9  # on an H100 0.80 of it


@pytest.mark.slow
def test_the_cost_of_a_run_has_all_its_digits(capsys):
    words = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.nodes=2"]
    asked = ["--devices", "8..16", "--tokens", "1T", "--price", "h100-sxm=2.5", "--json"]
    assert main(["plan", *words, *asked]) == 0
    points = json.loads(capsys.readouterr().out)["answers"]["devices"]
    assert main(["plan", *words, *asked[:-1]]) == 0
    out = capsys.readouterr().out
    for one in points:
        assert f"{one['takes']['cost']:,.0f}" in out
