"""Keys of the layout that a config gives are held fixed by `meshwright plan`."""

import json

import pytest

from meshwright.layout import Layout
from meshwright.planner.plan import plan
from meshwright.spec.loading import load_config
from test_plan import SEVEN, run


def fixed(capsys, *words):
    """The layouts that are ranked with some keys of the layout given, and what is fixed."""
    code, out = run(capsys, "plan", *SEVEN, "--json", "--top", "20", *words)
    assert code == 0
    found = json.loads(out.out)
    return [Layout(**one["layout"]) for one in found["ranked"]], found


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "keys",
    [
        {"tp": 2},
        {"zero": 3, "microbatch": 2},
        {"recompute": "full"},
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 4, "sp": True},
        {"tp": 4, "sp": False},
        {"schedule": "1f1b", "pp": 4, "virtual_stages": 1},
        {"offload": "optimizer"},
        {"cp": 2, "cp_kind": "ulysses"},
    ],
)
def test_keys_of_the_layout_that_are_given_stay(capsys, tmp_path, keys):
    free, everything = fixed(capsys)
    assert everything["fixed"] == {}
    assert any(getattr(one, key) != value for one in free for key, value in keys.items())
    words = [f"layout.{key}={str(value).lower()}" for key, value in keys.items()]
    ranked, found = fixed(capsys, *words)
    assert ranked
    for one in ranked:
        assert {key: getattr(one, key) for key in keys} == keys
        assert one.world == 8
    assert found["fixed"] == keys
    assert 0 < found["considered"] < everything["considered"]
    assert sum(found["ruled_out"].values()) < found["considered"]
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    (tmp_path / "run.toml").write_text(f"[layout]\n{lines}")
    assert fixed(capsys, str(tmp_path / "run.toml"))[1]["ranked"] == found["ranked"]


def test_what_is_fixed_is_said(capsys):
    _, out = run(capsys, "plan", *SEVEN, "layout.tp=2", "layout.sp=false")
    assert "fixed by the config: layout.tp = 2, layout.sp = false" in out.out


@pytest.mark.often(4)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layout.tp=3"], "layout.tp = 3 must divide model.n_heads = 32; nearest legal: layout.tp"),
        (["layout.tp=2", "layout.pp=3"], "6 ranks do not divide the cluster's 8 devices"),
        (["layout.dp_shard=16"], "16 ranks do not divide the cluster's 8 devices"),
        (["layout.zero=0", "layout.dp_shard=2"], "nearest legal: layout.zero = 1"),
        (["layout.microbatch=5"], "layout.microbatch = 5 must divide"),
        (
            ["layout.pp=8", "layout.virtual_stages=5"],
            "40 stages, more than model.n_layers = 32, the",
        ),
        (["layout.tp=2", "--fewest"], "--fewest: its answer chooses the whole layout"),
        (["layout.zero=1", "--longest-context"], "the config fixes layout.zero = 1"),
        (["--explain", "tp3 mb1"], "layout.tp = 3 must divide model.n_heads = 32; nearest legal"),
        (["--explain", "zero3 shard8 mb3"], "layout.microbatch = 3 must divide"),
    ],
)
def test_keys_that_no_layout_has_are_refused(capsys, words, message):
    code, out = run(capsys, "plan", *SEVEN, *words)
    assert code == 2
    assert message in " ".join(out.err.split())


@pytest.mark.parametrize("schedule", ["gpipe", "naive"])
def test_a_schedule_that_others_beat_is_planned_where_it_is_fixed(schedule):
    words = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm"]
    config = load_config(None, [*words, "layout.pp=2", f"layout.schedule={schedule}"])
    assert plan(config, 1).best.layout.schedule == schedule
