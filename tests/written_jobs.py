"""Jobs that `launch` writes, for tests of them: the fixture `written`."""

import pytest
import yaml

from meshwright.cli import main

CONFIG = """
[model]
preset = "llama-3-8b"
[data]
source = "corpus"
[train]
batch = 64
[layout]
zero = 3
dp_shard = 16
[cluster]
preset = "h100-sxm"
nodes = 2
"""


@pytest.fixture
def written(tmp_path, capsys, monkeypatch):
    """Return a function that has a job written and returns it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)

    def write(target, *options, config="run.toml"):
        assert main(["launch", target, config, *options]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return write


def script_of(text):
    """The script of the first pod of manifests."""
    *_, found = yaml.safe_load_all(text)
    (group,) = found["spec"]["replicatedJobs"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    return container["command"][2]
