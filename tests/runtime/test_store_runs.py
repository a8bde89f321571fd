"""Whole runs that save into an object store: killed, resumed elsewhere, fetched; S3's own server.

Without an S3 server, a folder named by a `file://` URL takes its place: the same code, but for the
library's. With moto's server, which is in CI, ranks are killed amid saves to it, and it answers
with errors now and then.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from faulty import flip
from meshwright.checkpoint.commit import read_manifest, steps, verify
from meshwright.cli import main
from meshwright.store import place
from runs import TINY, clean_environ

HAS_S3 = all(importlib.util.find_spec(name) for name in ("s3fs", "moto"))
RUN = [
    *(*TINY, "train.steps=6", "checkpoint.every=2", "checkpoint.async=true", "log.name=run"),
    *("data.source=corpus.txt", "data.tokenizer=bytes", "layout.dp_shard=2", "layout.zero=3"),
]
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAHUNTER2", "AWS_SECRET_ACCESS_KEY": "hunter2-hunter2"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{n} times {n} is {n * n}\n\n" for n in range(3000)]
    (tmp_path / "corpus.txt").write_text("".join(lines))
    return tmp_path


def train(*words, fault=None, environ=None, code=0):
    """Run `meshwright train` and return its output."""
    environ = {**clean_environ(), **(environ or {}), **({"FAULT": fault} if fault else {})}
    command = [sys.executable, "-m", "meshwright", "train", *words]
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def hashes(root):
    """Return the hashes of the tensors of the newest step."""
    files = read_manifest(steps(root)[-1])["files"]
    return {name: entry["sha256"] for name, entry in files.items() if "safetensors" in name}


@pytest.mark.slow
def test_a_run_in_a_store_is_killed_resumed_elsewhere_and_fetched(folder, capsys):
    """Bit for bit as an undisturbed one in a folder; then on another layout and machine."""
    train(*RUN, "log.dir=whole")
    expected = hashes(folder / "whole" / "run" / "checkpoints")
    url = f"file://{folder}/bucket/run"
    train(*RUN, f"checkpoint.dir={url}", fault="1:save.shard:4:kill")
    root = place(url)
    assert hashes(root) == expected
    assert not [name for name in root.files() if "try-" in name and "step-00000002" in name]

    os.rename("runs", "lost")  # another machine
    output = train(
        "--resume", url, "train.steps=8", "layout.zero=0", "layout.pp=2", "layout.dp_shard=1"
    )
    assert "resuming after step 6" in output
    assert read_manifest(steps(root)[-1])["layout"].startswith("pp2")
    assert read_manifest(steps(root)[-1])["step"] == 8
    with open("runs/run/events.jsonl") as file:
        kinds = [json.loads(line)["event"] for line in file]
    assert "resume" in kinds

    assert main(["checkpoint", "verify", url]) == 0
    assert main(["checkpoint", "fetch", url, "here"]) == 0
    assert main(["checkpoint", "verify", "here"]) == 0
    assert main(["generate", "here", "--prompt", "2 times", "--max-tokens", "2"]) == 0
    assert main(["checkpoint", "prune", url, "--keep", "1"]) == 0
    assert [path.name for path in steps(root)] == ["step-00000008"]
    capsys.readouterr()
    for words in (
        ["generate", url, "--prompt", "x"],
        ["report", url],
        ["generate", "runs/run", "--prompt", "x"],
    ):
        assert main(words) == 2
        assert f"meshwright checkpoint fetch {url} OUT" in capsys.readouterr().err.replace(
            "\n", " "
        )


@pytest.mark.slow
def test_a_new_run_takes_no_store_of_another(folder):
    url = f"file://{folder}/bucket/run"
    train(*RUN, f"checkpoint.dir={url}", "train.steps=2")
    before = place(url).files()
    output = train(*RUN, f"checkpoint.dir={url}", "log.name=other", code=2)
    assert "holds steps of another run" in output
    assert "--resume runs/run" in " ".join(output.split())
    assert place(url).files() == before


@pytest.mark.slow
def test_a_store_that_takes_nothing_is_refused_before_the_start(folder):
    (folder / "bucket").write_text("a file")
    output = train(*RUN, f"checkpoint.dir=file://{folder}/bucket/run", code=2)
    assert "cannot be written" in output
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_data_in_a_store_trains_the_same_and_damaged_rows_are_left_out(folder, capsys):
    """Bit for bit as from the folder; resumed from either; then with a bit flipped in the store."""
    command = ["data", "prepare", "store", "--source", "corpus.txt", "--tokenizer", "bytes"]
    assert main(command) == 0
    capsys.readouterr()
    run = [word for word in RUN if not word.startswith("data.")]
    there = [f"data.source=file://{folder}/store", f"data.cache={folder}/cache", "log.name=there"]
    train(*run, "data.source=store", "log.name=here")
    train(*run, *there, "checkpoint.restarts=0", fault="1:save.shard:4:kill", code=3)
    train("--resume", "runs/there", "data.source=store")
    saved = [hashes(folder / "runs" / name / "checkpoints") for name in ("here", "there")]
    assert saved[0] == saved[1]
    assert list((folder / "cache" / "blocks").iterdir())

    flip(folder / "store" / "tokens-00000.bin", 100)
    again = [*run, f"data.source=file://{folder}/store", "data.cache=fresh", "train.steps=30"]
    output = train(*again, "log.name=stopped", code=3)
    assert "tokens-00000.bin is damaged within bytes 0-" in " ".join(output.split())
    train(*again, "log.name=skipped", "data.on_error=skip")
    with open("runs/skipped/events.jsonl") as file:
        events = [json.loads(line) for line in file]
    left_out = sum(event.get("rows_left_out", 0) for event in events)
    assert left_out > 0
    logs = [(folder / "runs/skipped/logs" / f"rank-{n}.log").read_text() for n in (0, 1)]
    assert any("rows are left out" in " ".join(log.split()) for log in logs)


def test_jobs_that_look_for_steps_in_a_folder_refuse_a_url(capsys):
    command = ["launch", "skypilot", "--name", "job", "--setup", "pip list"]
    assert main([*command, *TINY, "checkpoint.dir=s3://bucket/run"]) == 2
    assert "looks for steps in a folder" in capsys.readouterr().err.replace("\n", " ")


# --- moto's S3 server --------------------------------------------------------------------------

FLAKY = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

app = DomainDispatcherApplication(create_backend_app)
count = 0


def flaky(environ, start_response):
    # Every fifth request that changes something gets an error, half of them after it was done.
    global count
    if environ["REQUEST_METHOD"] in ("PUT", "POST") and "/run/" in environ["PATH_INFO"]:
        count += 1
        if count % 5 == 0:
            if count % 2:
                list(app(environ, lambda *_: None))
            start_response("503 Slow Down", [("Content-Type", "text/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"]
    return app(environ, start_response)


run_simple("127.0.0.1", int(sys.argv[1]), flaky if sys.argv[2] == "flaky" else app, threaded=True)
"""


@pytest.fixture
def serve(folder):
    """Return a function that starts S3's stand-in with a bucket, and returns its environment."""
    if not HAS_S3:
        pytest.skip("needs s3fs and moto")
    servers = []

    def start(kind):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with (folder / "moto.log").open("w") as log:
            command = [sys.executable, "-c", FLAKY, str(port), kind]
            servers.append(subprocess.Popen(command, stdout=log, stderr=log))
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                request = urllib.request.Request(f"{url}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                break
            except OSError:
                time.sleep(0.1)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # of an earlier test, with another port
        return {**KEYS, "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}

    yield start
    for server in servers:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("sound", "1:save.shard:4:kill"),
        ("sound", "0:save.rename:4:kill"),
        ("sound", "0:save.pointer:4:kill"),
        ("sound", "0:save.purge:6:kill"),
        ("flaky", None),
    ],
)
def test_a_run_on_s3_is_the_one_of_a_folder(serve, folder, monkeypatch, kind, fault):
    environ = serve(kind)
    train(*RUN, "log.dir=whole")
    train(*RUN, "checkpoint.dir=s3://bucket/run", fault=fault, environ=environ)
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    root = place("s3://bucket/run")
    assert hashes(root) == hashes(folder / "whole" / "run" / "checkpoints")
    verified = [verify(step)["step"] for step in steps(root)]
    # Killed before it removes the oldest step, the last save leaves it to the next one.
    assert verified == ([2, 4, 6] if fault is not None and "purge" in fault else [4, 6])
    folders = {name.rpartition("/")[0] for name in root.files() if "try-" in name}
    assert len(folders) == len(verified)
    written = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    contents = [path.read_bytes() for path in written] + [
        (root / name).read() for name in root.files()
    ]
    for secret in KEYS.values():
        assert not any(secret.encode() in content for content in contents)
    os.rename("runs", "lost")
    output = train("--resume", "s3://bucket/run", "train.steps=8", environ=environ)
    assert "resuming after step 6, from s3://bucket/run" in output


@pytest.mark.parametrize("kind", ["sound", "flaky"])
def test_an_object_of_several_parts_and_a_condition(serve, monkeypatch, kind):
    """Also where every fifth request fails, half of them after it was done."""
    for key, value in serve(kind).items():
        monkeypatch.setenv(key, value)
    import meshwright.store as store_module

    monkeypatch.setattr(store_module, "PART", 5 * 2**20)
    monkeypatch.setattr(store_module, "PAUSES_S", (0.0,) * 5)
    path = place("s3://bucket/run/large")
    for size in (0, 5 * 2**20, 13 * 2**20 + 1, 32 * 2**20):
        data = os.urandom(size)
        path.upload(
            lambda file, data=data: [
                file.write(data[at : at + 2**20]) for at in range(0, len(data), 2**20)
            ],
            size,
        )
        assert b"".join(path.pieces()) == data
    assert path.read(7, 2**23) == data[7 : 2**23]
    with pytest.raises(FileExistsError):
        path.create(b"other")
    path.create(data)  # repeated, its first answer lost
    with pytest.raises(KeyboardInterrupt):
        place("s3://bucket/run/torn").upload(stopped)
    assert list(place("s3://bucket/run").files()) == ["large"]


def stopped(file):
    file.write(bytes(11 * 2**20))
    raise KeyboardInterrupt("stopped")
