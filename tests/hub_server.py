"""A server on this machine that speaks as much of the Hub's API as `huggingface_hub` uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?$")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class HubServer(ThreadingHTTPServer):
    """Repositories with commits; `requests` has the method and path of each request.

    `token` opens the repositories of `gated` and `private`. `cut` files are sent half, once each.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits = {}  # of each repository, the files of each commit, oldest first
        self.requests, self.ranges = [], []
        self.gated, self.private, self.cut = set(), set(), set()
        self.token = "hf_secret"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

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
            content = {"id": repository, "sha": sha, "siblings": siblings}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _file(self, name, sha, data):
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"}
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
        if self.command == "GET":
            self.wfile.write(data)


def _oid(data):
    return hashlib.sha1(data).hexdigest()
