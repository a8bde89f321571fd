"""Fixtures that whole-run tests share."""

import pytest

from meshwright.spec.loading import load_config
from runs import TINY


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text(
        "<|endoftext|>".join(f"story {n}: the cat sat on mat {n}. " * 9 for n in range(60))
    )
    return file


@pytest.fixture
def config(corpus, tmp_path):
    def make(*overrides):
        fixed = [f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
        where = [f"log.dir={tmp_path / 'runs'}", "log.name=run"]
        return load_config(None, [*TINY, *fixed, *where, *overrides])

    return make
