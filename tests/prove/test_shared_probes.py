"""The probes of other trainers that are shared, proven as they are: wrong in known ways."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from meshwright.cli import main

pytest.importorskip("accelerate", reason="transformers loads sharded models with accelerate")

PROBES = Path(__file__).parents[2].parent / "shared" / "probes" / "foreign"
pytestmark = [
    pytest.mark.skipif(not PROBES.is_dir(), reason="the shared probes are missing"),
    pytest.mark.execs,
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SHARED_EXPERTS = {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}
# Of case 4: a public fault, the layout, and the kind and parameter of the verdict.
PUT_BACK = {
    "48205": (SHARED_EXPERTS, "missing sum", "mlp.gate.weight"),
    "160285": ({"fsdp_size": 2, "ep_size": 2}, "scaled", "mlp.experts."),
    "2387": ({"tp_size": 2}, "missing sum", "mlp.gate.weight"),
}


def verdict_of(command, tmp_path, monkeypatch, capsys):
    """Return the verdict of `prove` on a command that is wrong."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("TMPDIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    code = main(["prove", "--json", "--folder", str(tmp_path / "steps"), "--", *command])
    verdict = json.loads(capsys.readouterr().out)
    assert code == 1, verdict
    return verdict


def assert_heads_are_summed_again(verdict):
    (fault,) = verdict["faults"]
    assert (fault["kind"], fault["axes"]) == ("summed again", ["tp"]), fault
    assert sorted(name.rsplit(".", 2)[-2] for name in fault["tensors"]) == ["k_norm", "q_norm"]
    assert "2 g0 + g1" in fault["sentence"]


def test_gradients_of_accumulated_microbatches_under_tp(tmp_path, monkeypatch, capsys):
    """Case 1 compares by hand: the wrong one is the last of its five models."""
    script = PROBES / "case1" / "repro.py"
    verdict = verdict_of([*TORCHRUN, str(script)], tmp_path, monkeypatch, capsys)
    assert_heads_are_summed_again(verdict)


def test_the_trainer_under_tp(tmp_path, monkeypatch, capsys):
    """Case 3: the Trainer's own loop, whose logged losses nearly agree."""
    command = [*TORCHRUN, str(PROBES / "case3" / "train.py"), "2", "2", "2"]
    assert_heads_are_summed_again(verdict_of(command, tmp_path, monkeypatch, capsys))


@pytest.mark.parametrize("fault", PUT_BACK)
def test_public_faults_that_are_put_back(fault, tmp_path, monkeypatch, capsys):
    """Case 4: the gradients are wrong, and the loss is right to six digits."""
    layout, kind, name = PUT_BACK[fault]
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("MUT", fault)
    made = [sys.executable, str(PROBES / "make.py"), "mixtral"]
    probe = [*TORCHRUN, str(PROBES / "mut.py"), "mixtral", json.dumps([layout])]
    both = f"{shlex.join(made)} && {shlex.join([*probe, str(tmp_path / 'out.txt')])}"
    verdict = verdict_of(["bash", "-c", both], tmp_path, monkeypatch, capsys)
    first = verdict["faults"][0]
    assert (first["kind"], verdict["refused"]) == (kind, None), verdict
    assert name in first["tensors"][0]
