"""A server on this machine that speaks as much of the Hub's API as `huggingface_hub` uses.

Uploads go by Git LFS: `hf_xet`, which sends chunks to a service of its own, has to be disabled.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?$")
_FILE = re.compile(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
_WRITE = re.compile(
    r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main|/([^/]+/[^/]+)\.git/info/lfs/objects/batch"
)


class HubServer(ThreadingHTTPServer):
    """Repositories with commits; `requests` has the method and path of each request.

    Files in `large` have a SHA-256 as their tag, or what `tags` says. `token` opens the
    repositories of `gated` and `private`, and may write to the owners of `writable`. `cut` files
    are sent half, once each. `uploads` has the bytes of each large file that arrived; after
    `most_uploads` of them, one more is refused.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits = {}  # of each repository, the files of each commit, oldest first
        self.requests, self.ranges = [], []
        self.gated, self.private, self.cut = set(), set(), set()
        self.large, self.tags = set(), {}
        self.token = "hf_secret"
        self.writable, self.uploads, self.most_uploads = {"lab"}, {}, 100
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def serve(self, monkeypatch, cache):
        """Have `huggingface_hub` ask this server, without a token, until the test ends."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repository, files):
        """Add a commit with such files, and return its hash."""
        files = {
            name: text.encode() if isinstance(text, str) else text for name, text in files.items()
        }
        commits = self.commits.setdefault(repository, {})
        sha = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[sha] = {
            name: data.encode() if isinstance(data, str) else data for name, data in files.items()
        }
        return sha

    def commit_folder(self, repository, folder):
        return self.commit(repository, {path.name: path.read_bytes() for path in folder.iterdir()})

    def fetched(self, suffix):
        return [path for method, path in self.requests if method == "GET" and path.endswith(suffix)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Print nothing."""

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_PUT(self):
        """Take a large file."""
        data = self._body()
        self.server.requests.append(("PUT", self.path))
        if len(self.server.uploads) >= self.server.most_uploads:
            return self._refuse(400, "Broken")
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.server.uploads[oid] = data
        return self._send(200, {}, b"")

    def do_POST(self):
        """Create a repository, say how to upload its files, or commit them."""
        body, path = self._body(), self.path.partition("?")[0]
        self.server.requests.append(("POST", path))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        match = _WRITE.fullmatch(path)
        if match is None:
            return self._refuse(404, "RepoNotFound")
        repository, kind = match[1] or match[3], match[2] or "batch"
        if not self._may_write(repository):
            return self._refuse(403, "Forbidden")
        return {"preupload": self._modes, "batch": self._batch, "commit": self._commit}[kind](
            repository, body
        )

    def _may_write(self, repository):
        is_open = self.headers.get("Authorization") == f"Bearer {self.server.token}"
        return is_open and repository.partition("/")[0] in self.server.writable

    def _create(self, asked):
        repository = f"{asked['organization']}/{asked['name']}"
        if not self._may_write(repository):
            return self._refuse(403, "Forbidden")
        if repository in self.server.commits:
            return self._refuse(409, "Conflict")
        if asked.get("private") or asked.get("visibility") == "private":
            self.server.private.add(repository)
        self.server.commit(repository, {})
        return self._json({"url": f"{self.server.url}/{repository}"})

    def _modes(self, repository, body):
        """Say which files are large: those of weights."""
        files = [file["path"] for file in json.loads(body)["files"]]
        modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
        return self._json(
            {
                "files": [
                    {"path": name, "uploadMode": mode, "shouldIgnore": False}
                    for name, mode in modes.items()
                ]
            }
        )

    def _batch(self, repository, body):
        """Say where to send large files; those that have arrived need no upload."""
        objects = []
        for file in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.server.url}/lfs/{file['oid']}"}}
            known = file["oid"] in self.server.uploads
            objects.append(file | ({} if known else {"actions": upload}))
        return self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repository, body):
        files = dict(list(self.server.commits[repository].values())[-1])
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.uploads[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.server.commit(repository, files)
        url = f"{self.server.url}/{repository}/commit/{sha}"
        return self._json({"commitUrl": url, "commitOid": sha})

    def _body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _json(self, content):
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _answer(self):
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, path))
        match = _API.match(path) or _FILE.match(path)
        if match is None:
            return self._refuse(404, "RepoNotFound")
        is_api = match.re is _API
        repository, revision = match[1], (match[3] or "main") if is_api else match[2]
        is_open = self.headers.get("Authorization") == f"Bearer {self.server.token}"
        if repository in self.server.gated and not is_open and not (is_api and match[2] != "tree"):
            return self._refuse(401, "GatedRepo")
        commits = self.server.commits.get(repository)
        if commits is None or (repository in self.server.private and not is_open):
            return self._refuse(401, "RepoNotFound")
        sha = list(commits)[-1] if revision == "main" else revision
        if sha not in commits:
            return self._refuse(404, "RevisionNotFound")
        files = commits[sha]
        if is_api:
            return self._listing(match[2], repository, sha, files)
        if match[3] not in files:
            return self._refuse(404, "EntryNotFound", sha)
        return self._file(match[3], sha, files[match[3]])

    def _listing(self, kind, repository, sha, files):
        if kind == "tree":
            content = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in files.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            private = repository in self.server.private
            content = {"id": repository, "sha": sha, "siblings": siblings, "private": private}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _file(self, name, sha, data):
        tag = hashlib.sha256(data).hexdigest() if name in self.server.large else _oid(data)
        tag = self.server.tags.get(name, tag)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        status, total = 200, len(data)
        if (asked := self.headers.get("Range")) is not None:
            start = int(re.match(r"bytes=(\d+)-", asked)[1])
            self.server.ranges.append((name, start))
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
            status, data = 206, data[start:]
        if self.command == "GET" and name in self.server.cut:
            self.server.cut.remove(name)
            self._send(status, headers | {"Content-Length": str(len(data))}, data[: total // 2])
            self.close_connection = True
            return
        self._send(status, headers, data)

    def _refuse(self, status, code, sha=None):
        self._send(status, {"X-Error-Code": code, **({"X-Repo-Commit": sha} if sha else {})}, b"")

    def _send(self, status, headers, data):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(data):
    return hashlib.sha1(data).hexdigest()
