"""A block of another system's config that is switched off sets nothing, and refuses nothing."""

import json

import pytest

from meshwright.interop.importing import import_files
from meshwright.interop.table import load_table
from test_interop import ARGS, BATCH, config_of, imported
from test_interop_neox import NEOX

# What any key may have, of each kind; a block that is off is read by nobody.
VALUES = (4, True, "cpu", [1, 2])


def deepspeed_keys():
    """Each key below a section that `enabled` switches, with its section."""
    table = load_table("deepspeed")
    for key in table.rows:
        section, dot, name = key.partition(".")
        if dot and name != "enabled" and "*" not in key:
            row = table.find(f"{section}.enabled")
            if row is not None:
                yield section, name


def nested(names, value):
    for name in reversed(names):
        value = {name: value}
    return value


@pytest.mark.often(3)
@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("off", [False, None])
def test_a_section_that_is_off_is_not_read(tmp_path, value, off):
    plain = config_of(imported(tmp_path, BATCH, devices=4, is_fixed=True))
    switched = set(load_table("deepspeed").switched)
    keys = [one for one in deepspeed_keys() if off is False or one[0] in switched]
    assert len(keys) > 40
    for section, name in keys:
        inner = nested(name.split("."), value)
        content = {**BATCH, section: {**inner, "enabled": off}}
        found = imported(tmp_path, content, devices=4, is_fixed=True)
        refused = [(entry.key, entry.note) for entry in found.report.refused]
        assert not refused, (section, name)
        assert config_of(found) == plain, (section, name)


def test_wandb_that_is_off_needs_no_wandb(tmp_path):
    for block in ({"enabled": False}, {"enabled": False, "project": "p"}, {"project": "p"}, {}):
        config = config_of(imported(tmp_path, {**BATCH, "wandb": block}))
        assert config.log.wandb is None, block
    config = config_of(imported(tmp_path, {**BATCH, "wandb": {"enabled": True}}))
    assert config.log.wandb == "deepspeed"


@pytest.mark.parametrize("off", [{}, {"use_wandb": False, "use_comet": False}, {"use_wandb": None}])
def test_trackers_of_gpt_neox_that_are_off(tmp_path, off):
    more = {"wandb_project": "p", "wandb_group": "g", "wandb_team": "t", "comet_workspace": "w"}
    text = NEOX.replace("{", json.dumps({**off, **more})[:-1] + ",", 1)
    found = imported(tmp_path, text, "a.yml", devices=4, is_fixed=True)
    assert config_of(found).log.wandb is None


def test_trackers_of_megatron_that_are_off(tmp_path):
    for options in ("--wandb-exp-name a --wandb-save-dir b", "--wandb-project '' --wandb-entity e"):
        file = tmp_path / "train.sh"
        file.write_text(ARGS.rstrip("\n") + f" {options}\n")
        found = import_files([file])
        assert config_of(found).log.wandb is None, options
