"""TinyStories: downloaded once, compared with what the server states, never half there."""

import hashlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshwright.data.corpora import FILES, TinyStories
from meshwright.errors import DataError

STORIES = b"\n<|endoftext|>\n".join(b"Once upon a time %d." % n for n in range(500))


class Hub(BaseHTTPRequestHandler):
    """Answers like the hub: size and hash on a redirect, the bytes elsewhere."""

    def do_HEAD(self):
        self.send_response(302)
        self.send_header("Location", f"/cdn{self.path}")
        self.send_header("Content-Length", "0")
        for name, value in self.server.stated.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self):
        self.server.gets += 1
        if self.path.startswith("/cdn/"):
            self.send_response(200)
            self.send_header("Content-Length", str(len(STORIES)))
            self.end_headers()
            self.wfile.write(self.server.content)
        else:
            self.do_HEAD()

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.gets = 0
    server.content = STORIES
    sha256 = hashlib.sha256(STORIES).hexdigest()
    server.stated = {"X-Linked-Size": str(len(STORIES)), "X-Linked-Etag": f'"{sha256}"'}
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def source(hub, folder, **options):
    return TinyStories(folder, base=f"http://127.0.0.1:{hub.server_port}", **options)


def test_download_verify_and_reuse(hub, tmp_path):
    seen = []
    first = source(hub, tmp_path / "new", progress=lambda done, total: seen.append((done, total)))
    fingerprint = first.fingerprint()
    assert fingerprint["sha256"] == hashlib.sha256(STORIES).hexdigest()
    assert seen[-1] == (len(STORIES), len(STORIES))
    stories = [text for part in first.parts() for text in first.documents(part)]
    assert stories == [f"Once upon a time {n}." for n in range(500)]
    gets = hub.gets
    assert source(hub, tmp_path / "new").fingerprint() == fingerprint
    assert hub.gets == gets
    assert not [p for p in (tmp_path / "new").iterdir() if ".tmp-" in p.name]


def test_a_file_put_there_by_hand_is_taken(tmp_path):
    path = tmp_path / FILES["valid"]
    path.write_bytes(STORIES)
    stories = TinyStories(tmp_path, "valid", base="http://127.0.0.1:1")
    assert stories.fingerprint()["size"] == len(STORIES)
    assert stories.parts()


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_damaged_copy_is_refused(hub, tmp_path, change):
    stories = source(hub, tmp_path)
    stories.fingerprint()
    content = bytearray(STORIES)
    content[100] ^= 1
    stories.path.write_bytes(content if change == "flip" else content[:-1])
    with pytest.raises(DataError, match=r"recorded.*remove it"):
        stories.parts()


@pytest.mark.parametrize(
    ("stated", "content", "match"),
    [
        ({"X-Linked-Size": "99999"}, STORIES, f"{len(STORIES)} bytes.*states 99999"),
        ({"X-Linked-Size": "10"}, STORIES, "states 10 bytes"),
        ({"X-Linked-Etag": '"' + "0" * 64 + '"'}, STORIES, "states 0000"),
        ({"X-Linked-Etag": '"abc"'}, STORIES, "states no size and SHA-256"),
        ({}, STORIES[:-1] + b"?", "got SHA-256"),
        ({}, STORIES[:1000], "cannot download"),
    ],
)
def test_what_does_not_match_never_appears(hub, tmp_path, stated, content, match):
    hub.stated |= stated
    hub.content = content
    stories = source(hub, tmp_path)
    with pytest.raises(DataError, match=match) as caught:
        stories.fingerprint()
    assert "stdlib" in str(caught.value)
    assert str(stories.path) in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock"]


def test_no_network_says_what_else_to_do(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stories = TinyStories(tmp_path, base=f"http://127.0.0.1:{port}")
    with pytest.raises(DataError, match=r"cannot download.*stdlib or your own files.*place the"):
        stories.fingerprint()


def test_unknown_part(tmp_path):
    with pytest.raises(DataError, match="train, valid"):
        TinyStories(tmp_path, "test")
