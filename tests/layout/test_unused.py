"""What a layout leaves unused, and that whoever starts or prices it is told."""

import pytest

from meshwright.cli import main
from meshwright.layout import Machine, left_over, resolve_layout, unsharded
from meshwright.runtime.checks.notes import run_notes
from meshwright.runtime.doctor import examine_config
from meshwright.runtime.session import prepare_job
from meshwright.spec.loading import load_config
from runs import clean_environ

LEFT_OVER = {
    # devices, overrides -> what is said of them
    (2, "train.batch=3"): "1 of 2 devices are used: train.batch = 3 does not divide among 2 "
    "data-parallel ranks; train.batch=2 or train.batch=4 would use all",
    (2, "layout.dp_replicate=1"): "1 of 2 devices are used: layout.dp_replicate = 1 is given; "
    "layout.dp_replicate=2 would use all",
    (2, "layout.dp_replicate=1 layout.zero=3"): "1 of 2 devices are used: layout.dp_replicate = 1 "
    "is given; layout.dp_shard=2 would use all",
    (8, "layout.dp_shard=2 layout.zero=3"): "2 of 8 devices are used: layout.dp_shard = 2 is "
    "given; layout.dp_replicate=4 or layout.dp_shard=8 would use all",
    (4, "layout.pp=3 layout.dp_replicate=1"): "3 of 4 devices are used: layout.pp = 3 and "
    "layout.dp_replicate = 1 are given; layout.pp=4 would use all",
    (8, "layout.dp_replicate=2 layout.tp=2 train.batch=6"): "4 of 8 devices are used: "
    "layout.dp_replicate = 2 and layout.tp = 2 are given; layout.dp_replicate=4 train.batch=8 "
    "would use all",
    (2, "layout.zero=1"): None,
    (2, "layout.tp=2 train.batch=3"): None,
}


def resolved(devices, words):
    config = load_config(None, words.split())
    return config, resolve_layout(config, Machine("cuda", devices, 4, "GPU", is_fixed=True))


@pytest.mark.parametrize("case", LEFT_OVER)
def test_devices_left_over_name_their_cause_and_what_uses_them(case):
    devices, words = case
    config, layout = resolved(devices, words)
    found = left_over(config, layout, devices)
    assert (None if found is None else found.text) == LEFT_OVER[case]
    for change in () if found is None else found.legal:
        config, layout = resolved(devices, f"{words} {change}")
        assert layout.world == devices


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("layout.dp_replicate=1 layout.zero=3", "there is one data-parallel rank"),
        ("layout.pp=2 layout.zero=1", "there is one data-parallel rank"),
        ("layout.dp_replicate=2 layout.zero=1", "layout.dp_shard=2 layout.dp_replicate=1 shards"),
        ("layout.zero=1", None),
        ("layout.cp=2 layout.zero=1", None),
        ("layout.pp=2 layout.zero=1 layout.offload=params", None),
    ],
)
def test_a_stage_that_shards_nothing_is_told(words, said):
    told = unsharded(resolved(2, words)[1])
    assert told is None if said is None else said in told


def test_train_doctor_and_plan_tell_what_shards_nothing(config, capsys):
    own = config("layout.pp=2", "layout.zero=3", "train.steps=1")
    job = prepare_job(own, clean_environ())
    (told,) = [text for text in run_notes(job, clean_environ()) if "shards nothing" in text]
    assert told in [one.text for one in examine_config(own, clean_environ())]
    words = ["cluster.preset=a100-80gb", "cluster.devices_per_node=2", "--explain", "pp2 zero3 mb1"]
    assert main(["plan", *words]) == 0
    assert "layout.zero = 3 shards nothing" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("cluster.devices_per_node=1 layout.zero=2", "there is one data-parallel rank"),
        ("layout.tp=2 layout.zero=3", "there is one data-parallel rank"),
        (
            "layout.dp_replicate=2 layout.dp_shard=1 layout.zero=3",
            "layout.dp_shard = 1, and each of",
        ),
    ],
)
def test_plan_says_why_no_layout_has_a_stage_that_shards_nothing(capsys, words, why):
    given = ["cluster.preset=a100-80gb", "cluster.devices_per_node=2", *words.split()]
    assert main(["plan", *given]) == 2
    said = capsys.readouterr().err
    assert f"shards nothing: {why}" in said
    assert "nearest legal: layout.zero = 0" in said


def test_a_job_that_leaves_devices_idle_is_refused_with_the_cause(capsys):
    words = ["launch", "slurm", "cluster.preset=a100-80gb", "cluster.devices_per_node=8"]
    assert main([*words, "train.batch=12"]) == 2
    said = capsys.readouterr().err
    assert "train.batch = 12 does not divide among 8 data-parallel ranks" in said
    assert "nearest legal: train.batch=8, train.batch=16 or" in said
    assert main([*words, "train.batch=16", "layout.dp_replicate=2"]) == 2
    said = capsys.readouterr().err
    assert "layout.dp_replicate = 2 is given; nearest legal: layout.dp_replicate=8" in said
