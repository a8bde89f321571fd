"""Fixtures that whole-run tests share, and the marks of the fault cases in the report."""

import gc
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import zlib

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings

from forking import Forks, Server
from meshwright.cost.calibration import SHIPPED
from meshwright.kernels.fp32_matmuls import take_route
from meshwright.runtime.pricing.measured import VARIABLE
from meshwright.spec.loading import load_config
from outcomes import Outcomes
from ranks import FOLDERS, close_pools
from runs import TINY, ip
from written_jobs import written  # noqa: F401 - a fixture

sys.path.extend(folder for folder in FOLDERS if folder not in sys.path)
pytest.register_assert_rewrite("faulty")
# A name of a folder that is missing, "no/such", is not a request to the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Under nohup it is ignored, and so it would be by the commands whose answer to it is tested.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# How long an example takes says how busy the machine is. `make test` takes the same few
# examples on each run; CI draws more, others for each commit, by the seed that it prints.
settings.register_profile(
    "drawn", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("same", settings.get_profile("drawn"), derandomize=True, max_examples=30)
settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """The folder of all tests' cache folders, where what sessions share has its own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("caches")
        patch.setenv("XDG_CACHE_HOME", str(folder / "session"))
        patch.setenv(VARIABLE, SHIPPED)  # no start measures this machine unless a test wants it to
        yield folder


@pytest.fixture(autouse=True)
def own_cache(caches, request, monkeypatch):
    """No test reads or writes what a user's cache folder, or another test's, has of this machine.

    The folder is not made: few tests have a use for it.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches / f"{id(request.node):x}"))


@pytest.fixture(autouse=True)
def no_measurement(request, monkeypatch):
    """No test measures this machine but those that say so."""
    if request.node.get_closest_marker("perf") is None:
        monkeypatch.setattr("meshwright.runtime.measure.measuring._on_ranks", _not_here)


def _not_here(*_):
    pytest.fail(f"this test measures the machine: give it an environment with {VARIABLE}={SHIPPED}")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Workers that share the cores compute with one thread each: waiting threads spin."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_seed(request):
    """What a test draws follows from its name, not from the tests before it.

    Ranks take the seed on from here: see `ranks.on_ranks`.
    """
    seed = seed_of(request.node.nodeid)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def seed_of(nodeid):
    """Return the seed of a test's draws."""
    return zlib.crc32(nodeid.encode())


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text(
        "<|endoftext|>".join(f"story {n}: the cat sat on mat {n}. " * 9 for n in range(60))
    )
    return file


@pytest.fixture(scope="session", autouse=True)
def processes_are_forked():
    """Have ranks and commands forked from a process that has imported torch."""
    if not sys.platform.startswith("linux") or os.environ.get("MESHWRIGHT_TESTS_EXEC"):
        yield None
        return
    server = Server()
    forks = Forks(server.start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forks.popen)
        yield forks
    server.close()


@pytest.fixture(autouse=True)
def forks(processes_are_forked, request):
    """The switch of forked processes, off where a test needs them started anew."""
    if processes_are_forked is None:
        return Forks(lambda request, files: None)
    marks = {mark.name for mark in request.node.iter_markers()}
    processes_are_forked.is_on = not marks & {"faults", "execs", "perf"}
    return processes_are_forked


@pytest.fixture(autouse=True)
def own_products():
    """No test computes in fp32 by the kernels that an earlier one has taken."""
    yield
    take_route("torch", torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks():
    """The pools of ranks serve one file of tests; the next one's ranks know nothing of it."""
    yield
    close_pools()


@pytest.fixture
def config(corpus, tmp_path):
    def make(*overrides):
        fixed = [f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
        where = [f"log.dir={tmp_path / 'runs'}", "log.name=run"]
        return load_config(None, [*TINY, *fixed, *where, *overrides])

    return make


@pytest.fixture
def outcome(record_property):
    """Takes down what becomes of a fault."""
    return Outcomes(record_property)


@pytest.fixture
def go(config, tmp_path, outcome):
    """Return a function that trains with a fault, and says what came of it."""
    from faulty import train_with

    def run(fault, *overrides, **words):
        return train_with(config, tmp_path / "runs", outcome, fault, *overrides, **words)

    return run


@pytest.fixture(scope="session")
def undisturbed():
    """What `whole` has found, by the overrides of the run."""
    return {}


@pytest.fixture
def whole(go, forks, undisturbed):
    """Return the hashes of the last step's files of a run that nothing disturbs."""
    from faulty import last_files

    def run(*overrides):
        if overrides not in undisturbed:
            was, forks.is_on = forks.is_on, True
            folder, _, _ = go(None, *overrides, name="whole")
            forks.is_on = was
            undisturbed[overrides] = last_files(folder)
        return undisturbed[overrides]

    return run


def leave_slow(items):
    """Mark the cases of tests that are `often(n)` as slow, but for n of each, evenly spread."""
    cases = {}
    for item in items:
        if item.get_closest_marker("often") and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for those in cases.values():
        count = those[0].get_closest_marker("often").args[0]
        kept = {at * len(those) // count for at in range(min(count, len(those)))}
        for at, item in enumerate(those):
            if at not in kept and count < len(those):
                item.add_marker("slow")


def pytest_collection_finish():
    """Spare each later collection of garbage the modules and the thousands of tests."""
    gc.freeze()


def cases_of(item):
    """Return the numbers of the fault cases that a test is of."""
    return sorted({number for mark in item.iter_markers("case") for number in mark.args})


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items):
    leave_slow(items)
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    for item in items:
        if numbers := cases_of(item):
            item.user_properties.append(("cases", " ".join(map(str, numbers))))


def command_of(item):
    """Return the command that runs a test alone, with the same draws."""
    config, words = item.config, ["-m", ""]
    for option in ("--hypothesis-profile", "--hypothesis-seed"):
        if (value := config.getoption(option, None)) is not None:
            words += [option, str(value)]
    return shlex.join([".venv/bin/python", "-m", "pytest", item.nodeid, *words])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test of a fault case that takes nothing down has not shown what it is for."""
    report = (yield).get_result()
    if report.failed:
        seed = f"seed of random, numpy and torch: {seed_of(item.nodeid)}, from the test's name"
        report.sections.append(("to run this test alone", f"{command_of(item)}\n{seed}"))
    has_outcome = any(name == "outcome" for name, _ in item.user_properties)
    if call.when == "call" and report.passed and cases_of(item) and not has_outcome:
        report.outcome, report.longrepr = "failed", "no outcome was recorded"


@pytest.fixture
def machines():
    """Two namespaces with a link between them, by name, address and interface."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"{os.getpid() % 10000}"
    names, links = (f"mw{tag}a", f"mw{tag}b"), (f"v{tag}a", f"v{tag}b")
    addresses = ("10.77.0.1", "10.77.0.2")
    if ip("netns", "add", names[0]).returncode:
        pytest.skip("this system makes no network namespaces")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, addresses, strict=True):
            ip("link", "set", link, "netns", name)
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{address}/24", "dev", link)
            ip(*inside, "link", "set", link, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield list(zip(names, addresses, links, strict=True))
    finally:
        for name in names:
            ip("netns", "del", name)
