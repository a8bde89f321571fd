"""The path of a GPU, rehearsed on a stand-in: messages, host waits and the order of streams."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks.rehearsal import at_random, case, checked, seeded
from benchmarks.rehearsal_kinds import FAULTS, KINDS, MODELS

from meshwright.cli.main import main
from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.simulate.on_standin import Watched, out_of_order, watch
from meshwright.simulate.stream_order import HOST, StreamOrder

SOME = ("shard2 zero3 mb2 recompute-full offload-optimizer",)
# All kinds take ten minutes on a busy machine.
PARTS = 4


@pytest.mark.slow
def test_a_step_on_a_gpu_waits_for_nothing_and_orders_its_streams():
    small = MODELS["llama"].model_copy(update={"n_layers": 2}).model_dump_json()
    found = list(watch([{**case(label), "model": small, "ranks": [0]} for label in SOME]))
    assert [one.label for one in found] == [Layout.parse(label).label for label in SOME]
    for one in found:
        assert one.passed, one
    assert [len(one.named) for one in found] == [2]  # what offload waits for is named


@pytest.mark.slow
@pytest.mark.parametrize("first", range(PARTS))
def test_every_kind_of_layout_does(first):
    kinds = KINDS[first::PARTS]
    for kind, one in zip(kinds, checked([case(*kind) for kind in kinds]), strict=True):
        assert not one.caught, (kind, one)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_layouts_do(seed):
    assert [(label, told) for label, told in at_random(3, seed) if told] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_seeded_fault_is_caught_and_by_the_check_that_is_for_it(fault):
    assert seeded(fault).caught == [fault.check]


def test_a_fault_is_put_where_its_text_stands_once_alone():
    for fault in FAULTS:
        module, old, new = fault.edit
        text = Path(find_spec(module).origin).read_text(encoding="utf-8")
        assert text.count(old) == 1, fault
        compile(text.replace(old, new), module, "exec")


@pytest.mark.slow
def test_a_fault_whose_text_is_gone_is_told():
    with pytest.raises(MeshwrightError, match="does not have once: no such text"):
        list(watch([case("mb2")], [("meshwright.parallel.batch", "no such text", "")]))


def sends(rank, *messages):
    return Watched("a layout", rank, (), (), (), (), 0.0, messages)


def test_messages_of_a_group_are_in_one_order():
    total, gather = ((kind, "data", (0, 1), 8, -1, 0) for kind in ("all_reduce", "all_gather"))
    assert out_of_order([sends(0, total, gather), sends(1, total, gather)]) == ()
    swapped = out_of_order([sends(0, total, gather), sends(1, gather, total)])
    assert [text.partition(" of rank 0 ")[0] for text in swapped] == [
        "data of ranks 0, 1: message 1",
        "data of ranks 0, 1: message 2",
    ]
    (missing,) = out_of_order([sends(0, total, gather), sends(1, total)])
    assert missing.endswith("of rank 1 None")


def test_transfers_of_a_pair_are_in_one_order():
    away = [("send", "pp", (0, 1), 8, 1, microbatch) for microbatch in (0, 1)]
    come = [("recv", "pp", (0, 1), 8, 0, microbatch) for microbatch in (0, 1)]
    assert out_of_order([sends(0, *away), sends(1, *come)]) == ()
    assert len(out_of_order([sends(0, *away), sends(1, *come[::-1])])) == 2
    # Both ways share a communicator: a receive that waits first holds up the send behind it.
    back = [("recv", "pp", (0, 1), 8, 1, 0), ("send", "pp", (0, 1), 8, 0, 0)]
    assert out_of_order([sends(0, away[0], back[0]), sends(1, come[0], back[1])]) == ()
    assert out_of_order([sends(0, away[0], back[0]), sends(1, back[1], come[0])])
    # A ring begins the two of a step together.
    around = [(kind, "cp", (0, 1), 8, peer, 0) for peer in (0, 1) for kind in ("send", "recv")]
    assert out_of_order([sends(0, *around[2:]), sends(1, *around[1::-1])]) == ()


@pytest.mark.slow
def test_a_case_that_cannot_be_rehearsed_is_told():
    with pytest.raises(MeshwrightError, match="the rehearsal on the stand-in ended"):
        list(watch([{**case("mb2"), "layout": "{}", "model": "{}"}]))


class Tensor:
    """A tensor as far as its memory goes."""

    device = torch.device("meta")  # not the host's

    def __init__(self):
        self.storage = Storage()

    def untyped_storage(self):
        return self.storage


class Storage:
    @property
    def _cdata(self):
        return id(self)


@pytest.fixture
def order():
    found = StreamOrder()
    found.new_stream(), found.new_stream()
    return found


def test_a_use_before_the_write_is_waited_for_is_a_fault(order):
    made = Tensor()
    order.use(0, [], [made], "write")
    order.use(1, [made], [], "read")
    assert "before it is written" in order.faults[0]
    order.wait(1, order.now(0))
    order.use(1, [made], [], "read")
    assert len(order.faults) == 1
    order.use(0, [], [made], "write again")
    assert "while it is read" in order.faults[1]


def test_memory_that_another_stream_uses_is_not_given_anew(order):
    for kept in (False, True):
        made = Tensor()
        order.use(0, [], [made], "write")
        order.wait(1, order.now(0))
        order.use(1, [made], [], "read")
        if kept:
            order.keep(made, 1)
        del made
        other = Tensor()
        order.use(0, [], [other], "write another")
        assert len(order.faults) == 1, order.faults
    assert "is used again" in order.faults[0]
    order.use(1, [], [made := Tensor()], "write")
    order.wait(0, order.now(1))
    order.use(0, [made], [], "read")
    order.wait(1, order.now(0))
    del made
    order.use(1, [], [Tensor()], "write")
    assert len(order.faults) == 1


def test_the_host_reads_nothing_that_has_not_arrived(order):
    pinned = Tensor()
    order.use(HOST, [], [pinned], "empty")
    order.use(0, [], [pinned], "copy_")
    order.use(HOST, [pinned], [], "tolist")
    assert order.faults[0].startswith("the host uses memory")
    order.host_waits("event", order.now(0))
    order.use(HOST, [pinned], [], "tolist")
    assert len(order.faults) == 1


@pytest.mark.slow
def test_the_command_says_what_it_checked(capsys):
    words = ["model.dim=64", "model.n_layers=2", "train.seq_len=32", "train.batch=4"]
    words += ["layout.dp_shard=2", "layout.zero=3", "train.precision=bf16"]
    assert main(["simulate", *words, "--device", "cuda", "--world", "2", "--ranks", "0"]) == 0
    told = capsys.readouterr().out
    assert "no wait of the host" in told
