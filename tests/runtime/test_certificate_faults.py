"""Optimizer state that is restored wrongly: the resume certificate must be refused."""

import pytest

from meshwright.layout import Layout
from meshwright.prove.shrink import shrink
from meshwright.runtime.certificate import certify
from meshwright.runtime.session import train
from runs import clean_environ, faulty_worker

# Code that restores a rank's optimizer wrongly. On the same layout it does not show.
RESTORES = {
    # Each of two tp ranks has the other's state: written and read at the same wrong offsets.
    "swapped": """
def region_of(held, parallel, real=state.region_of):
    found = real(held, parallel)
    at = held.sharding.tp_dim
    if at is None or not IN_STATE:
        return found
    start, stop = found[at]
    other = (stop, 2 * stop - start) if start == 0 else (0, start)
    return (*found[:at], other, *found[at + 1 :])

chunks_of, fill = state.chunks_of, state.fill_optimizer

def swapped_chunks(trained):
    IN_STATE.append(1)
    state.region_of = region_of
    wrong = chunks_of(trained).optimizer
    IN_STATE.clear()
    return state.Chunks(chunks_of(trained).weights, wrong)

def swapped_fill(*args):
    IN_STATE.append(1)
    state.region_of = region_of
    fill(*args)
    IN_STATE.clear()

IN_STATE = []
state.chunks_of = swapped_chunks
state.fill_optimizer = swapped_fill
""",
    # On a layout of one rank, what is read of the first moment is dropped.
    "zeroed": """
fill = state.fill_optimizer

def forgetful(trained, stored, scalars):
    fill(trained, stored, scalars)
    if trained.parallel.program.layout.world == 1:
        for one in trained.optimizer.state.values():
            one["exp_avg"].zero_()

state.fill_optimizer = forgetful
""",
}


@pytest.mark.slow  # test_resume refuses a certificate, too: for its data
@pytest.mark.parametrize("fault", ["swapped", "zeroed"])
@pytest.mark.timeout(300)
def test_a_certificate_is_refused_where_the_optimizer_is_restored_wrongly(
    fault, config, tmp_path, monkeypatch
):
    """Every rank of the runs has the fault; at the same layout nothing differs."""
    code = "import meshwright.checkpoint.state as state\n" + RESTORES[fault]

    def faulty(config, environ, out, resume=None):
        return train(config, environ, out, resume=resume, command=faulty_worker(code))

    monkeypatch.setattr("meshwright.runtime.certificate.train", faulty)
    own = config("layout.tp=2")
    case = shrink(own.model, own.train, Layout.parse("tp2 mb2"))[0]
    verdicts = list(certify(own, case, tmp_path / "runs", clean_environ()))
    passed = {verdict.claim: verdict.passed for verdict in verdicts}
    assert passed["5 + 5 steps are 10, bit for bit"]
    assert not passed["on one rank steps 6 to 8 add the same to weights"]
    assert not passed["on one rank step 8 has the same state"]
