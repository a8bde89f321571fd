"""Emulated processors: what the table says of each, what is refused, and that it takes effect."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from ci import processors
from ci.parts import PROCESSOR_SHARES, of_commit
from ci.processor_table import TABLE
from ci.processors import Run, main, table

from meshwright.kernels.processor import fingerprint, processor
from meshwright.program.target import route

ROOT = Path(__file__).parents[2]
REAL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model name\t: Some Xeon
cache size\t: 107520 KB
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx512_bf16 amx_bf16

processor\t: 1
vendor_id\t: GenuineIntel
cpu family\t: 6

"""


@pytest.mark.parametrize("name", TABLE)
def test_what_is_read_of_an_emulated_processor(name, tmp_path):
    emulated, file = TABLE[name], tmp_path / "cpuinfo"
    file.write_text(emulated.cpuinfo(REAL))
    read = processor(file)
    assert read == (emulated.vendor, emulated.family)
    assert route("auto", read).label == emulated.route
    text = file.read_text()
    assert text.count("processor\t:") == emulated.cores
    assert f"cache size\t: {emulated.cache}\n" in text
    flags = next(line for line in text.splitlines() if line.startswith("flags")).split()[2:]
    assert not any(flag.startswith(emulated.hides) for flag in flags)
    assert set(emulated.needs) <= set(flags)


def test_the_table_has_every_route_vendor_and_number_of_cores(tmp_path):
    rows = TABLE.values()
    assert {one.aten for one in rows} == {"default", "avx2", "avx512"}
    assert {one.cores for one in rows} == {1, 2, 4}
    assert {one.family for one in rows if one.vendor == "AuthenticAMD"} == {25, 26}
    assert len({one.route for one in rows}) == 3
    prints = set()
    for one in rows:
        file = tmp_path / one.name
        file.write_text(one.cpuinfo(REAL))
        prints.add(fingerprint(file))
    assert len(prints) == len(TABLE)


def test_a_few_commits_have_every_processor_and_every_share():
    draw = Random(5)
    parts = [
        next(p for p in of_commit(f"{draw.getrandbits(160):040x}") if p.name == "processors")
        for _ in range(300)
    ]
    assert {p.why.partition(",")[0] for p in parts} == set(TABLE)
    assert len({p.why.partition(",")[2] for p in parts}) == PROCESSOR_SHARES
    assert all(set(TABLE) < set(p.command) for p in parts)  # a machine may lack the first ones


def test_more_cores_are_shown_to_every_process(tmp_path):
    """Also to one whose environment has PYTHONPATH and nothing else."""
    more = TABLE["zen5"]
    one = processors.Emulated(replace(more, cores=64), tmp_path / "emulated", Path(sys.executable))
    one.write(REAL)
    folder = one.environ["PYTHONPATH"].partition(os.pathsep)[0]
    code = "import os; print(len(os.sched_getaffinity(0)), os.cpu_count())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": folder},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["64", "64"]
    assert done.stderr == ""
    assert (one.folder / "cpuinfo").read_text().count("processor\t:") == 64
    fewer = processors.Emulated(replace(more, cores=1), tmp_path / "fewer", Path(sys.executable))
    fewer.write(REAL)
    assert [file.name for file in fewer.folder.iterdir()] == ["cpuinfo"]
    assert "taskset" in fewer.command()


def seen(name):
    one = TABLE[name]
    return {
        "vendor": one.vendor,
        "family": one.family,
        "cache": one.cache,
        "cores": one.cores,
        "route": one.route,
        "aten": one.aten.upper(),
        "onednn": "Intel AVX2",
        "mkl": "Intel(R) Advanced Vector Extensions 2 (Intel(R) AVX2) CNR:OFF",
    }


@pytest.mark.parametrize(
    ("key", "value", "vendor", "said"),
    [
        ("aten", "AVX512", "GenuineIntel", ["aten 'AVX512' instead of 'AVX2'"]),
        ("cores", 1, "GenuineIntel", ["cores 1 instead of 2"]),
        ("route", "torch's own", "GenuineIntel", ["route", "instead of"]),
        ("onednn", "Intel AVX-512", "GenuineIntel", ["onednn 'Intel AVX-512', which is not"]),
        ("mkl", "AVX-512 CNR:OFF", "GenuineIntel", ["mkl", "which is not"]),
        ("mkl", "AVX-512 CNR:OFF", "AuthenticAMD", []),  # MKL's limits are for Intel's alone
    ],
)
def test_an_emulation_without_effect_is_told(key, value, vendor, said):
    assert TABLE["zen3"].differences(seen("zen3"), vendor) == []
    wrong = TABLE["zen3"].differences({**seen("zen3"), key: value}, vendor)
    assert len(wrong) == bool(said)
    assert all(text in wrong[0] for text in said)


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A machine whose processor is that of `REAL`, where nothing can be mounted."""
    file = tmp_path / "cpuinfo"
    file.write_text(REAL)
    monkeypatch.setattr(processors, "CPUINFO", file)
    for tool in ("unshare", "taskset", "mount"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return file


def test_what_this_machine_cannot_emulate_is_refused(real, capsys):
    with pytest.raises(SystemExit, match=r"needs root and the right to mount.*not permitted"):
        main(["zen3"])
    with pytest.raises(SystemExit):
        main(["zen9"])
    assert "there are: intel-sse" in capsys.readouterr().err
    real.write_text(REAL.replace("vendor_id", "CPU implementer"))
    with pytest.raises(SystemExit, match="on x86 alone"):
        main(["zen3"])


def test_processors_without_what_they_need_are_left_out_with_their_reason(
    real, monkeypatch, capsys
):
    real.write_text(REAL.replace("amx_bf16", "").replace("avx512_bf16", ""))
    monkeypatch.setattr(processors, "emulation_problem", lambda: None)
    monkeypatch.setattr(processors.Emulated, "check", lambda self: "itself")
    monkeypatch.setattr(
        processors, "run", lambda one, words, turn: Run(one.processor.name, "passed", (9, 0, 1), 2)
    )
    monkeypatch.setattr(
        processors, "table", lambda runs: "\n".join(f"{x.name} {x.outcome}" for x in runs)
    )
    with pytest.raises(SystemExit, match="zen4: the real processor has no avx512_bf16"):
        main(["zen4"])
    assert main(["zen4", "zen5", "intel-sse", "zen3", "--first"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "intel-sse passed"
    assert main(["--all", "--times", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("zen3 passed") == 2
    assert "zen4 left out" in said
    assert "=== zen4: left out, the real processor has no avx512_bf16" in said
    assert main(["--list"]) == 0
    assert "intel-amx (not here: the processor has no amx_bf16)" in capsys.readouterr().out


def test_the_table_of_runs_and_its_closing_line():
    runs = [
        Run("zen3", "passed", processors.Counts(7, 0, 2), 61.4),
        Run("zen5", "failed", processors.Counts(6, 1, 2), 70.6),
        Run("zen4", "left out", processors.Counts(), 0.0),
    ]
    lines = table(runs).splitlines()
    assert lines[1].split() == ["zen3", "passed", "61", "7", "0", "2"]
    assert lines[-1] == "13 of 14 tests passed"


CPUINFO = Path("/proc/cpuinfo")
HERE = CPUINFO.read_text() if CPUINFO.is_file() else ""


@pytest.mark.slow
@pytest.mark.execs
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root and unshare"
)
@pytest.mark.parametrize("name", [one.name for one in TABLE.values() if not one.lacking(HERE)])
def test_tests_and_ranks_run_on_the_emulated_processor(name):
    words = ["--python", sys.executable, "--", "tests/cli/test_units.py", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "ci.processors", name, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    emulated = TABLE[name]
    assert f"vendor {emulated.vendor}, family {emulated.family}" in done.stdout
    assert f"cores {emulated.cores}, " in done.stdout
    assert f"aten {emulated.aten.upper()}" in done.stdout
    assert f"{name}  " in done.stdout
