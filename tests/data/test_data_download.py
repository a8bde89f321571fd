"""TinyStories: downloaded once, compared with what the server states, never half there."""

import hashlib

import pytest
from huggingface_hub import constants

from hub_server import HubServer
from meshwright.data.corpora import FILES, REPOSITORY, TinyStories
from meshwright.errors import DataError

STORIES = b"\n<|endoftext|>\n".join(b"Once upon a time %d." % n for n in range(500))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = HubServer()
    server.serve(monkeypatch, tmp_path / "cache of the library")
    server.commit(REPOSITORY, dict.fromkeys(FILES.values(), STORIES))
    server.large = set(FILES.values())
    yield server
    server.shutdown()
    server.server_close()


def test_download_verify_and_reuse(hub, tmp_path):
    first = TinyStories(tmp_path / "new")
    fingerprint = first.fingerprint()
    assert fingerprint["sha256"] == hashlib.sha256(STORIES).hexdigest()
    stories = [text for part in first.parts() for text in first.documents(part)]
    assert stories == [f"Once upon a time {n}." for n in range(500)]
    hub.requests.clear()
    assert TinyStories(tmp_path / "new").fingerprint() == fingerprint
    assert hub.requests == []
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == [".lock", FILES["train"], f"{FILES['train']}.json"]


def test_a_download_that_is_cut_goes_on_where_it_was(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut.add(FILES["train"])
    assert TinyStories(tmp_path).fingerprint()["size"] == len(STORIES)
    assert hub.ranges == [(FILES["train"], len(STORIES) // 2 // 1000 * 1000)]


def test_a_file_put_there_by_hand_is_taken(hub, tmp_path):
    path = tmp_path / FILES["valid"]
    path.write_bytes(STORIES)
    stories = TinyStories(tmp_path, "valid")
    assert stories.fingerprint()["size"] == len(STORIES)
    assert stories.parts()
    assert hub.requests == []


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_damaged_copy_is_refused(hub, tmp_path, change):
    stories = TinyStories(tmp_path)
    stories.fingerprint()
    content = bytearray(STORIES)
    content[100] ^= 1
    stories.path.write_bytes(content if change == "flip" else content[:-1])
    with pytest.raises(DataError, match=r"recorded.*remove it"):
        stories.parts()


@pytest.mark.parametrize(
    ("tag", "match"), [("0" * 64, "the server states 0000"), ("abc", "states no commit and SHA")]
)
def test_what_does_not_match_never_appears(hub, tmp_path, tag, match):
    hub.tags[FILES["train"]] = tag
    stories = TinyStories(tmp_path / "stories")
    with pytest.raises(DataError, match=match) as caught:
        stories.fingerprint()
    assert "stdlib" in str(caught.value)
    assert str(stories.path) in str(caught.value)
    assert not stories.path.exists()
    del hub.tags[FILES["train"]]
    assert stories.fingerprint()["size"] == len(STORIES)


def test_no_network_says_what_else_to_do(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"cannot download.*stdlib or your own files.*place the"):
        TinyStories(tmp_path).fingerprint()


def test_unknown_part(tmp_path):
    with pytest.raises(DataError, match="train, valid"):
        TinyStories(tmp_path, "test")
