"""Files that are read from outside, damaged at random: each is read, or refused in words.

A few seconds of what `python -m benchmarks.fuzz` does for as long as one likes, always the same.
"""

import random
import tempfile
from pathlib import Path

import pytest
from benchmarks.fuzz import Found, Reader, attempt, damage
from benchmarks.fuzz_readers import make_readers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError

EXAMPLES = 6  # of each reader


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    return make_readers(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.case(49)
def test_a_damaged_file_is_read_or_refused(readers, outcome):
    refused = 0
    for reader in readers:
        found = tried(reader)
        assert found.tried >= EXAMPLES
        refused += found.tried - found.taken
    assert refused > 2 * len(readers)
    outcome.add(2, f"{refused} of {EXAMPLES * len(readers)} damaged files refused", 0.0)


def tried(reader):
    """Return what came of a reader's examples; fails where one of them did."""
    found, failures = Found(), []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # the number says all; a smaller one is no smaller damage
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def check(seed):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "it"
            damage(reader, folder, random.Random(seed))
            failure = attempt(reader, folder, found)
        if failure is not None:
            failures.append((seed, failure))

    check()
    assert failures == [], reader.name
    return found


def test_examples_are_read_as_they_are(readers, tmp_path):
    for reader in readers:
        folder = tmp_path / reader.name
        for name, content in reader.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        reader.read(folder)


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda at: [][0], "IndexError"),
        (lambda at: b"x" * (600 * 2**20), "of new memory"),
        (lambda at: (_ for _ in ()).throw(ConfigError("a " * 11_000)), "long message"),
        (lambda at: (_ for _ in ()).throw(ConfigError("no")), None),
    ],
)
def test_what_counts_as_a_failure(read, says, tmp_path):
    failure = attempt(Reader("it", {}, (), read), tmp_path, Found())
    assert (failure is None) if says is None else (says in failure)
