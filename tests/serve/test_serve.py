"""The server of `plan --serve`: what it answers, what it refuses, and that it keeps answering."""

import json
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace

import pytest

from meshwright.cli import main
from meshwright.cost.calibration import shipped_calibration
from meshwright.errors import ConfigError
from meshwright.planner.plan import plan
from meshwright.serve.answer import SECTIONS as PAGE_SECTIONS
from meshwright.serve.answer import answer, detail, devices_answer, model_words, named_files
from meshwright.serve.app import HAS_UI, HOST, LARGEST_BODY, MISSING, application, serve
from meshwright.serve.conditions import Conditions
from meshwright.serve.plan_page import page
from meshwright.serve.worker import reply
from meshwright.spec.loading import KEYS, load_config, read_given

needs_ui = pytest.mark.skipif(not HAS_UI, reason="the extra ui is not installed")
PORT = 8000
SMALL = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", "train.batch=64"]
QUESTION = {"words": SMALL, "show": []}


@pytest.fixture(scope="module")
def client():
    client_of = pytest.importorskip("starlette.testclient", reason="the extra ui is not installed")
    with client_of.TestClient(application(PORT, SMALL), base_url=f"http://{HOST}:{PORT}") as opened:
        yield opened


def test_the_answer_is_the_plan():
    made, found = plan(load_config(None, SMALL)), answer(QUESTION)
    assert found["command"] == "meshwright plan " + " ".join(SMALL)
    assert [one["label"] for one in found["ranked"]] == [o.layout.label for o in made.found.ranked]
    (best,) = found["shown"]
    assert best["step_time_s"] == made.best.time.total
    assert best["why_not"] == ""
    assert max(rank["total"] for rank in best["ranks"]) == made.best.memory.total
    ends = [span[2] for rank in best["timeline"]["ranks"] for span in rank]
    assert max(ends) <= best["timeline"]["actions_end"] * (1 + 1e-5) < best["step_time_s"]


@pytest.mark.slow
def test_a_layout_that_does_not_fit_says_that_alone():
    """It was called "faster, but less simple", although no device could hold it."""
    large = ["model.preset=llama-3-8b", "cluster.preset=rtx4090", "cluster.nodes=2"]
    made = plan(load_config(None, [*large, "train.batch=64"]))
    found = detail(made, "shard16 zero1 mb4")
    assert found["why_not"].startswith("it does not fit: it needs ")
    assert "faster" not in found["why_not"]


def frozen(tmp_path, capsys, *words, code=0):
    """What the page of `plan --html` was given, and the document that the command prints."""
    path = tmp_path / "plan.html"
    assert main(["plan", *words, "--html", str(path), "--json"]) == code
    text = path.read_text()
    given = json.loads(re.search(r'id="given">(.*?)</script>', text, re.DOTALL)[1])
    assert len(text) < 2**20
    return given, json.loads(capsys.readouterr().out)


def test_a_frozen_page_has_the_command_with_its_questions(tmp_path, capsys):
    asked = ["--devices", "2..4", "--tokens", "1B", "--price", "h100-sxm=2", "--cheapest"]
    cluster = ["cluster.preset=h100-sxm", "cluster.devices_per_node=2"]
    given, _ = frozen(tmp_path, capsys, *SMALL[:1], *cluster, *asked)
    command = given["frozen"]["command"]
    assert all(part in command for part in ("--devices 2..4", "--tokens 1B", "--price h100-sxm=2"))
    assert command.endswith("--cheapest")


@pytest.mark.slow
def test_a_frozen_page_has_the_plan_of_many_devices(tmp_path, capsys):
    large = ["model.preset=llama-3-70b", "cluster.preset=h100-sxm", "cluster.nodes=8"]
    large += ["train.batch=128", "train.seq_len=8192", "train.precision=bf16", "--top", "4"]
    given, made = frozen(tmp_path, capsys, *large)
    found = given["frozen"]
    assert sorted(given["words"]) == sorted(large[:-2])
    assert [one["label"] for one in found["ranked"]] == [one["label"] for one in made["ranked"]]
    # Each of them is there in detail, with the numbers of the ranking.
    for one, ranked in zip(found["shown"], made["ranked"], strict=True):
        assert one | {key: ranked[key] for key in ranked if key != "why"} == one
        assert one["timeline"]["ranks"]
    assert found["ruled_out"] == made["ruled_out"]
    assert found["train"] == made["command"]
    assert found["train"].startswith("meshwright launch torchrun model.preset=llama-3-70b")
    assert found["command"] == "meshwright plan " + " ".join(large)
    assert found["calibration"] == made["calibration"]
    assert "Nothing has run on several GPUs yet" in found["has_run"]
    assert found["points"] == []


@pytest.mark.slow
def test_the_middle_of_a_long_step_is_folded():
    """The first and the last actions of each pipeline rank are drawn."""
    words = ["model.preset=llama-3-70b", "cluster.preset=h100-sxm", "cluster.nodes=8"]
    made = plan(load_config(None, [*words, "train.batch=1024", "train.precision=bf16"]))
    found = detail(made, "tp8 shard2 zero1 pp4 1f1b mb1")["timeline"]
    first, last = found["fold"]
    assert 0 < first < last < found["actions_end"]
    count = made.config.train.batch // 2
    for rank in found["ranks"]:
        assert {microbatch for *_, microbatch in rank} >= {0, 1, count - 2, count - 1}
        assert not [s for s in rank if first * (1 + 1e-5) < s[1] < last * (1 - 1e-5)]
        assert len(rank) < 450
    assert found["left_out"] == 4 * 2 * count - sum(map(len, found["ranks"]))
    short = detail(made, "tp8 shard2 zero1 pp4 1f1b mb32")["timeline"]
    assert (short["fold"], short["left_out"]) == (None, 0)


@pytest.mark.slow
def test_a_frozen_page_of_a_file_says_what_it_states(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "llama-3-8b"\n[cluster]\npreset = "h100-sxm"\n')
    given, made = frozen(tmp_path, capsys, str(file), "train.batch=64", "--devices", "8..16")
    assert given["words"] == [SMALL[0], SMALL[2], SMALL[1]]
    assert given["frozen"]["points"] == made["answers"]["devices"]


def test_a_frozen_page_where_nothing_fits(tmp_path, capsys):
    words = ["model.preset=llama-3-70b", "cluster.preset=a40", "cluster.nodes=1"]
    words += ["cluster.devices_per_node=1", "train.batch=1"]
    found = frozen(tmp_path, capsys, *words, code=1)[0]["frozen"]
    assert found["unfit"].startswith("No layout fits. The nearest is")
    assert found["ranked"] == found["shown"] == []
    assert found["train"] is None


@pytest.mark.slow
def test_what_was_measured_of_a_cluster_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MESHWRIGHT_CALIBRATION", raising=False)
    plain = answer(QUESTION)
    step = 2 * plain["ranked"][0]["step_time_s"]
    measured = f"layout={plain['ranked'][0]['label']} step={step:.3f}s"
    assert main(["plan", *SMALL, "--measured", measured]) == 0
    capsys.readouterr()
    assert main(["plan", *SMALL, "--json"]) == 0
    corrected = json.loads(capsys.readouterr().out)
    # The page finds what is kept of the cluster, as the command does from now on.
    kept = Conditions({"XDG_CACHE_HOME": str(tmp_path)})
    found = answer(QUESTION, kept)
    assert found["ranked"][0]["step_time_s"] == corrected["ranked"][0]["step_time_s"]
    assert found["ranked"][0]["step_time_s"] > 1.3 * plain["ranked"][0]["step_time_s"]
    assert found["calibration"]["source"].startswith("plan --measured: ")
    assert not found["is_shipped"]
    assert plain["is_shipped"]
    point = devices_answer({"words": SMALL, "first": 8, "last": 8}, kept)["points"][0]
    assert point["step_time_s"] == found["ranked"][0]["step_time_s"]
    others = [*SMALL[:1], "cluster.preset=a100-80gb", *SMALL[2:]]
    assert answer({"words": others}, kept)["is_shipped"]


@pytest.mark.slow
def test_conditions_reach_the_process_that_plans():
    known = shipped_calibration()
    slow = {name: value * 2 for name, value in known.constants.items() if name.endswith("launch")}
    own = replace(known, constants={**known.constants, **slow}, source="mine", date="2026-01-01")
    conditions = Conditions({}, own, margin=0.2, top=3, flags=("--margin", "0.2"))
    lines = [json.dumps(conditions.as_json()), json.dumps(["plan", QUESTION])]
    worker = [sys.executable, "-m", "meshwright.serve.worker"]
    said = subprocess.run(
        worker, input="\n".join(lines), capture_output=True, text=True, check=True
    )
    found = json.loads(said.stdout)["answer"]
    assert found["calibration"] == {"source": "mine", "date": "2026-01-01"}
    assert len(found["ranked"]) == 3
    assert found["command"].endswith(" --margin 0.2")
    assert all(one["peak_memory_bytes"] <= 0.8 * found["limit"] for one in found["ranked"])


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("words", "flags", "says"),
    [
        (["--margin", "0.1", "--top", "3"], "--margin 0.1 --top 3", "fitted by"),
        (
            ["--measured", "layout=shard8 zero3 mb1 step=34s", "--no-keep"],
            "--measured 'layout=shard8 zero3 mb1 step=34s' --no-keep",
            "corrected by what was measured",
        ),
    ],
)
def test_the_page_is_served_under_the_conditions_of_the_command(
    words, flags, says, monkeypatch, capsys
):
    told = []
    monkeypatch.setattr("meshwright.serve.app.serve", lambda *given: told.append(given))
    assert main(["plan", *SMALL, "--serve", *words]) == 0
    ((_, asked, conditions, _),) = told
    assert asked == [SMALL[0], SMALL[2], SMALL[1]]
    found = answer({"words": asked}, conditions)
    assert found["command"].endswith(flags)
    assert says in found["calibration"]["source"]
    # The command to copy says the same.
    capsys.readouterr()
    assert main([*shlex.split(found["command"])[1:], "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [one["label"] for one in made["ranked"]] == [o["label"] for o in found["ranked"]]
    assert made["ranked"][0]["step_time_s"] == found["ranked"][0]["step_time_s"]


def test_pins_bind_and_why_not_is_said_of_any_layout():
    words = [*SMALL, "layout.tp=8", "layout.offload=none"]
    found = answer({"words": words, "show": ["tp8 sp mb1", "shard2 zero3 tp4 sp mb1"]})
    assert all(one["layout"]["tp"] == 8 for one in found["ranked"])
    assert found["fixed"] == {"tp": "8", "offload": "none"}
    one, other = found["shown"]
    assert "refused" not in one
    assert "tp is fixed to 8" in other["why_not"]
    refused = answer({"words": SMALL, "show": ["tp3 mb1"]})["shown"][0]
    assert "layout.tp = 3 must divide" in refused["why_not"]
    assert "unknown word" in answer({"words": SMALL, "show": ["<b>"]})["shown"][0]["why_not"]


def test_the_config_to_copy_is_what_was_planned(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(answer({"words": [*SMALL, "layout.tp=2"]})["config"])
    one, other = load_config(path), load_config(None, [*SMALL, "layout.tp=2"])
    assert one.model_dump() == other.model_dump()


def test_a_curve_over_devices():
    points = devices_answer({"words": [*SMALL, "layout.pp=1"], "first": 2, "last": 8})["points"]
    assert [one["devices"] for one in points] == [2, 4, 8]
    assert points[0]["tokens_per_s"] < points[1]["tokens_per_s"] < points[2]["tokens_per_s"]


def test_a_curve_has_the_tokens_and_the_price_of_the_page():
    question = {"words": [*SMALL, "layout.pp=1", "cluster.price=2"], "first": 8, "last": 8}
    (plain,), (few,) = (
        devices_answer({**question, **tokens})["points"] for tokens in ({}, {"tokens": "300B"})
    )
    assert (plain["takes"]["tokens"], few["takes"]["tokens"]) == (1e12, 3e11)
    assert few["takes"]["cost"] == pytest.approx(plain["takes"]["cost"] * 0.3)
    for tokens in ("many", "-1", "1X", "nan", "1e30"):
        with pytest.raises(ConfigError, match="must be a number from 1 to 1e18; nearest legal"):
            devices_answer({**question, "tokens": tokens})


def test_the_answer_has_what_holds_where_a_field_is_empty():
    defaults = answer({"words": SMALL})["defaults"]
    assert defaults["cluster.nodes"] == "1"
    assert defaults["cluster.devices_per_node"] == "8"
    assert defaults["train.precision"] == "bf16"
    assert int(defaults["train.seq_len"]) > 1


def test_layouts_are_in_order_of_time_after_the_best():
    ranked = answer({"words": [*SMALL, "cluster.nodes=4"]})["ranked"]
    times = [one["step_time_s"] for one in ranked[1:]]
    assert len(times) > 2
    assert times == sorted(times)


def test_a_dropped_config_is_a_model():
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
    sizes |= {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096}
    words = model_words({"model_type": "llama", **sizes, "rms_norm_eps": 1e-5})
    model = load_config(None, words).model
    preset = load_config(None, ["model.preset=llama-2-7b"]).model
    assert (model.dim, model.n_layers, model.ffn_dim) == (preset.dim, preset.n_layers, 11008)
    assert "model_type" in reply("model", {"model_type": "resnet"})["error"]
    assert "not a JSON object" in reply("model", [1])["error"]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"words": [*SMALL, "train.batch=99999999999"]}, "less than or equal to 2147483647"),
        ({"words": [*SMALL, "train.batch=" + "9" * 400]}, "train.batch"),
        ({"words": [*SMALL, "data.source=/etc/passwd"]}, "the page does not set it"),
        ({"words": ["cluster.preset=local"]}, "set cluster.preset"),
        ({"words": ["cluster.preset=h200-xyz"]}, "is not known"),
        ({"words": "train.batch=1"}, "must be a list"),
        ({"words": SMALL * 40}, "at most 64"),
        ({"words": SMALL, "show": ["mb1"] * 3}, "at most 2"),
        ([1], "a question is a JSON object"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(question, said):
    assert said in reply("plan", question)["error"]


@pytest.fixture(scope="module")
def opened():
    """The names of files that this process opens while the tests of this module run."""
    names, watching = [], True

    def watch(event, facts):  # a hook for audits cannot be removed
        if watching and event == "open":
            names.append(str(facts[0]))

    sys.addaudithook(watch)
    yield names
    watching = False


@pytest.mark.parametrize(
    "key", [f"{section}.{key}" for section in PAGE_SECTIONS for key in KEYS[section]]
)
def test_no_request_has_a_file_read(tmp_path, opened, key):
    path = tmp_path / "secret.toml"
    path.write_text("[h100]\nmemory = 1\n")
    opened.clear()
    for name in (path, f'["{path}"]'):
        reply("plan", {"words": [*SMALL, f"{key}={name}"]})
        reply("devices", {"words": [*SMALL, f"{key}={name}"], "first": 1, "last": 1})
    assert not [name for name in opened if name.startswith(str(tmp_path))]


def test_the_files_that_the_command_named_are_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("")
    question = {"words": [*SMALL, f"cluster.calibration={path}"]}
    assert "the page names no files" in reply("plan", question)["error"]
    files = named_files(read_given(None, question["words"]))
    conditions = Conditions.from_json(json.loads(json.dumps(Conditions(files=files).as_json())))
    assert "answer" in reply("plan", question, conditions)
    shipped = {"words": [*SMALL, "cluster.calibration=shipped"]}
    assert "answer" in reply("plan", shipped, conditions)


def test_the_page_holds_its_state_and_asks_nobody_else():
    live = page(["model.preset=</script><b>"])
    assert "</script><b>" not in live
    assert "connect-src &#x27;self&#x27;" in live
    assert not re.findall(r"(?:src|href)=[\"']?https?:", live)
    frozen = page([], {"ranked": []})
    assert "connect-src &#x27;none&#x27;" in frozen


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("meshwright.serve.app.HAS_UI", False)
    assert main(["plan", "--serve"]) == 2
    assert MISSING in capsys.readouterr().err


@needs_ui
def test_other_hosts_and_origins_are_refused(client):
    assert client.get("/").status_code == 200
    for headers, status in (
        ({"Host": "evil.example"}, 421),
        ({"Host": f"{HOST}:{PORT + 1}"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ):
        found = client.post("/api/plan", json=QUESTION, headers=headers)
        assert found.status_code == status, headers
        assert found.json()["error"]
    headers = {"Origin": f"http://localhost:{PORT}", "Host": f"localhost:{PORT}"}
    found = client.post("/api/plan", json=QUESTION, headers=headers)
    assert found.status_code == 200
    assert "access-control-allow-origin" not in found.headers
    assert "frame-ancestors 'none'" in found.headers["content-security-policy"]


@needs_ui
def test_it_keeps_answering_after_bad_input(client):
    bad = [
        (b"x" * 10_000_000, 413),
        (b"[" * 100_000, 400),
        (b"", 400),
        (b"\xff\xfe", 400),
        (b"{", 400),
        (b"null", 422),
        (b'{"words": [1]}', 422),
        (b'{"words": ["train.batch=' + b"9" * 5000 + b'"]}', 422),
    ]
    headers = {"Content-Type": "application/json"}
    for body, status in bad:
        found = client.post("/api/plan", content=body, headers=headers)
        assert (found.status_code, bool(found.json()["error"])) == (status, True), body[:20]
    parts = (b" " * 100_000 for _ in range(100))  # without a Content-Length
    assert client.post("/api/plan", content=parts, headers=headers).status_code == 413
    assert client.post("/api/passwd", json={}).status_code == 404
    assert client.get("/api/plan").status_code == 405
    found = client.post("/api/plan", json=QUESTION)
    assert found.json()["answer"]["ranked"]
    assert LARGEST_BODY < 10_000_000


@needs_ui
def test_a_search_without_end_is_ended():
    client_of = pytest.importorskip("starlette.testclient")
    short = application(PORT, limit_s=1e-3)
    with client_of.TestClient(short, base_url=f"http://{HOST}:{PORT}") as opened:
        for _ in range(2):
            found = opened.post("/api/plan", json=QUESTION)
            assert found.status_code == 422
            assert "took longer than 0.001 s and was ended" in found.json()["error"]


@needs_ui
def test_a_taken_port_is_refused_and_a_free_one_is_of_this_machine_alone():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(Exception, match="cannot be had"):
            serve(taken.getsockname()[1], [], Conditions(), print)
    words = [sys.executable, "-m", "meshwright", "plan", "--serve", *SMALL]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().split()[0]
            assert re.fullmatch(rf"http://{HOST}:\d+/", address)
            asked = urllib.request.Request(
                f"{address}api/plan",
                json.dumps(QUESTION).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked) as response:
                assert json.load(response)["answer"]["ranked"]
        finally:
            server.terminate()
