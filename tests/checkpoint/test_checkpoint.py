"""Checkpoints: whole or absent, verified, the same for every layout, and exact at resume."""

import json
import shutil

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from meshwright.checkpoint.commit import (
    MANIFEST,
    prune,
    step_name,
    steps,
    verify,
)
from meshwright.checkpoint.tensors import Chunk, Stored, write_chunks
from meshwright.checkpoint.weights import load_model, write_weights
from meshwright.errors import CheckpointError
from meshwright.models import build_model, init_model
from meshwright.spec.resolve import model_spec

MODEL = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 64}
# Few samples, so that a run of some steps passes the end of the data; dropout; accumulation.
HARD = ["model.dropout=0.1", "layout.microbatch=1", "train.batch=8", "train.steps=10"]


# --- files -----------------------------------------------------------------------------------


def chunks(tmp_path):
    """A 6x4 matrix cut in three files along both dims, and a vector in one of them."""
    whole = torch.arange(24.0).view(6, 4)
    vector = torch.arange(5, dtype=torch.bfloat16)
    cut = [
        [Chunk("m", (0, 0), whole[:3, :2]), Chunk("v", (0,), vector)],
        [Chunk("m", (0, 2), whole[:3, 2:])],
        [Chunk("m", (3, 0), whole[3:])],
    ]
    paths = [tmp_path / f"weights-{n:05d}.safetensors" for n in range(3)]
    for path, some in zip(paths, cut, strict=True):
        write_chunks(path, some)
    return paths, whole, vector


def test_any_region_is_read_from_the_chunks(tmp_path):
    paths, whole, vector = chunks(tmp_path)
    stored = Stored(paths)
    assert set(stored.names) == {"m", "v"}
    assert stored.shape("m") == (6, 4)
    assert torch.equal(stored.whole("m"), whole)
    assert torch.equal(stored.whole("v"), vector)
    for rows in ((0, 6), (1, 2), (2, 5), (3, 6), (4, 4)):
        for columns in ((0, 4), (0, 1), (1, 3), (2, 4)):
            found = stored.read("m", (rows, columns))
            assert torch.equal(found, whole[slice(*rows), slice(*columns)])
    with pytest.raises(CheckpointError, match="does not hold x"):
        stored.read("x", ((0, 1),))
    with pytest.raises(CheckpointError, match="holds 18 of the 24 elements asked of m"):
        Stored([paths[0], paths[2]]).read("m", ((0, 6), (0, 4)))


def test_the_files_are_a_distributed_checkpoint_of_torch(tmp_path):
    """Its own reader takes them, so that a run is not locked into ours."""
    _, whole, _ = chunks(tmp_path)
    state = {"m": torch.empty(6, 4)}
    torch.distributed.checkpoint.load(
        state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True
    )
    assert torch.equal(state["m"], whole)


# --- commits ---------------------------------------------------------------------------------


def state(seed):
    spec = model_spec(**MODEL)
    model = init_model(build_model(spec, device="cpu"), spec, seed)
    return spec, {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture
def step(tmp_path):
    return write_weights(tmp_path / "root", *state(1), {"tokenizer": "bytes"})


def test_a_committed_step_is_loaded_and_never_written_again(step):
    before = {p.name: p.read_bytes() for p in step.iterdir()}
    assert set(before) == {"weights-00000.safetensors", "model.json", MANIFEST}
    _, tensors = state(1)
    loaded = load_model(step)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, tensors[name])
    with pytest.raises(CheckpointError, match="is there already"):
        write_weights(step.parent, *state(2), {})
    assert {p.name: p.read_bytes() for p in step.iterdir()} == before


@pytest.mark.case(8, 9)
@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove"])
@pytest.mark.parametrize("name", ["weights-00000.safetensors", "model.json", MANIFEST])
def test_any_harm_to_any_file_is_found_and_named(step, name, harm, outcome):
    path = step / name
    data = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 4
        path.write_bytes({"flip": data, "truncate": data[:-1], "empty": b""}[harm])
    with outcome.refused(CheckpointError, name):
        verify(step)
    with pytest.raises(CheckpointError):
        load_model(step)


@pytest.mark.case(28)
def test_a_manifest_cannot_lead_out_of_its_folder(step, outcome):
    for name in ("../../etc/passwd", "a/b", "..", ""):
        forge(step, lambda m, name=name: m["files"].update({name: {"bytes": 1, "sha256": ""}}))
        with outcome.refused(CheckpointError, "not a plain file name"):
            verify(step)
    (step / "link").symlink_to("/etc/passwd")
    forge(step, lambda m: m.update(files={"link": {"bytes": 1, "sha256": ""}}))
    with outcome.refused(CheckpointError, "not a file"):
        verify(step)


def forge(step, change):
    """Change a manifest and make its digest fit, as someone would who means harm."""
    from meshwright.checkpoint.commit import _digest

    manifest = json.loads((step / MANIFEST).read_text())
    manifest.pop("digest", None)
    change(manifest)
    manifest["digest"] = _digest(manifest)
    (step / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.case(4)
def test_old_steps_go_after_the_new_one_is_verified(tmp_path, step, outcome):
    root = step.parent
    for n in (1, 2, 3):
        shutil.copytree(step, root / step_name(n))
    (root / step_name(3) / "model.json").write_text("{}")
    with outcome.refused(CheckpointError, r"model\.json is corrupt"):
        prune(root, 2)
    assert len(steps(root)) == 4
    shutil.rmtree(root / step_name(3))
    prune(root, 2)
    assert [p.name for p in steps(root)] == [step_name(1), step_name(2)]
