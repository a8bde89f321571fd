"""Pages of runs, comparisons, plans and layouts: what they say, and that figures are valid."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest

from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.report.ahead import layouts_page
from meshwright.report.curves import smooth
from meshwright.report.page import Page
from meshwright.report.record import read_run
from meshwright.report.run_page import comparison_page, report, run_page
from meshwright.report.timelines import panels, timelines
from run_folders import step_event, write_run

PIPELINE = ("layout.pp=2", "layout.microbatch=1", "train.batch=8", "model.n_layers=4")


def valid(page):
    """Raise where a figure is none, and return how many there are."""
    for figures in page.figures.values():
        for one in figures:
            go.Figure(one)
    return sum(map(len, page.figures.values()))


def text_of(page):
    main = page.html().partition("<main ")[2].partition("</main>")[0]
    return " ".join(re.sub(r"<[^>]+>", " ", main).split())


class Outline(HTMLParser):
    """Headings in order, landmarks, and elements that are left open."""

    VOID = frozenset({"meta", "link", "input", "br", "img"})

    def __init__(self):
        super().__init__()
        self.levels, self.ids, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag in ("h1", "h2", "h3"):
            self.levels.append(int(tag[1]))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_run_with_a_pipeline_shows_every_part(config):
    run = read_run(write_run(config(*PIPELINE, "layout.dp_replicate=1")))
    page = run_page(run)
    titles = [section.id for section in page.sections]
    assert titles == [
        *("headline", "curves", "layout", "steps", "memories", "time", "traffic", "config")
    ]
    assert {"loss", "mesh", "timeline", "memory", "causes", "messages"} <= set(page.figures)
    assert valid(page) >= 11
    text = text_of(page)
    assert "Done: 40 steps." in text
    assert "The last held-out loss is below the unigram entropy" in text
    assert "bubble" in text
    off = run.planned.step_time_s / run.measured.step_time_s - 1
    assert off < -0.1
    assert f"The predicted step time is {-off:.0%} too short." in text


def test_memory_comes_worst_rank_first_with_prediction_and_limit(config):
    page = run_page(read_run(write_run(config(*PIPELINE, "layout.dp_replicate=1"))))
    first, second = page.figures["memory"]
    peaks = [
        max(map(sum, zip(*(t["y"] for t in one["data"] if "stackgroup" in t), strict=True)))
        for one in (first, second)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert any(t["name"] == "predicted" for t in first["data"])
    assert any("limit 64.00 MiB" in one["text"] for one in first["layout"]["annotations"])


def test_the_predicted_memory_is_drawn_over_the_same_actions(config):
    run = read_run(write_run(config(*PIPELINE, "layout.dp_replicate=1"), slower=3.0))
    page = run_page(run)
    for figure in page.figures["memory"]:
        (line,) = (trace for trace in figure["data"] if trace["name"] == "predicted")
        area = next(trace for trace in figure["data"] if "stackgroup" in trace)
        assert line["text"] == area["text"]  # the same moments
        assert line["x"] == pytest.approx(area["x"])
    assert "stretched so that each action takes as long as it did" in text_of(page)


def test_a_smoothed_curve_begins_and_ends_where_the_values_do():
    values = [8.0 - step / 10 for step in range(60)]
    assert smooth(values) == pytest.approx(values)
    noisy = [value + (-1) ** step for step, value in enumerate(values)]
    assert smooth(noisy)[0] == noisy[0]
    assert len(smooth(noisy)) == len(noisy)


def test_numbers_beside_curves_have_their_units(config):
    text = text_of(run_page(read_run(write_run(config()))))
    assert re.search(r"Last 10\.\dk tokens/s, median 10\.\dk tokens/s", text)
    assert "Last 1.0%, median 1.0%." in text


def test_a_run_with_adapters_says_what_it_trains(config):
    page = run_page(read_run(write_run(config("lora.rank=2", "lora.alpha=4"))))
    assert re.search(
        r"Trained \S+ \d+\.\d% of the parameters: LoRA, rank 2, alpha 4, on all-linear",
        text_of(page),
    )
    assert "LoRA" not in text_of(run_page(read_run(write_run(config("log.name=plain")))))


def test_a_row_of_a_plan_stands_for_all_ranks_of_its_place(config):
    def names(*words):
        run = read_run(write_run(config(*words)))
        picture = timelines(panels([run.planned, run.measured]))["in time"]
        return [picture["layout"][axis]["ticktext"] for axis in ("yaxis", "yaxis2")]

    assert names("log.name=replicas") == [["each rank"], ["rank 0"]]
    pipeline = names(*PIPELINE, "layout.dp_replicate=1", "log.name=pipeline")
    assert pipeline == [["pp 0 · s0", "pp 1 · s1"], ["rank 0 · s0", "rank 1 · s1"]]


def test_the_document_is_in_order(config):
    html = report([write_run(config(*PIPELINE, "layout.dp_replicate=1"))])
    outline = Outline()
    outline.feed(html)
    assert outline.open == []
    assert outline.levels[0] == 1
    assert outline.levels.count(1) == 1
    steps = zip(outline.levels, outline.levels[1:], strict=False)
    assert all(after - before <= 1 for before, after in steps)
    assert len(set(outline.ids)) == len(outline.ids)
    assert len(html) < 2**20
    assert not re.search(r'(src|href)="(https?:)?//', html)
    assert "<script>" in html
    packed = re.search(r'id="figures">([^<]+)<', html)[1]
    found = json.loads(gzip.decompress(base64.b64decode(packed)))
    drawn = re.findall(r'data-figure="([^"]+)"', html)
    assert set(drawn) == set(found)


def test_what_users_wrote_is_escaped(config):
    folder = write_run(config("layout.dp_replicate=1", "data.text_key=<script>alert(1)</script>"))
    html = report([folder])
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_one_rank_without_a_pipeline(config):
    page = run_page(read_run(write_run(config("layout.dp_replicate=1"))))
    valid(page)
    figure, _ = page.figures["timeline"]
    assert not any(trace["name"] == "idle" for trace in figure["data"])
    assert "ledger.json" not in text_of(page).partition("Files")[0]


def test_a_run_of_an_older_version_says_what_is_missing(config):
    folder = write_run(config("layout.dp_replicate=1"), profile=False)
    (folder / "provenance.json").unlink()
    page = run_page(read_run(folder))
    valid(page)
    text = text_of(page)
    assert "ledger.json is not there" in text
    assert "provenance.json is not there: it tells where its values came from" in text
    assert "timeline" not in page.figures


def test_a_config_of_another_version_still_has_curves(config):
    folder = write_run(config("layout.dp_replicate=1"))
    (folder / "config.toml").write_text("[model]\nunheard_of = 1\n")
    plan_file = json.loads((folder / "plan.json").read_text())
    plan_file["config"]["model"]["unheard_of"] = 1
    (folder / "plan.json").write_text(json.dumps(plan_file))
    page = run_page(read_run(folder))
    assert "loss" in page.figures
    assert "config.toml cannot be read by this version" in text_of(page)
    assert "mesh" not in page.figures


def test_a_crashed_run_with_a_cut_line(config):
    events = [
        {"event": "start", "steps": 100, "world": 1, "parameters": 10},
        *(step_event(step, 100, 1) for step in range(1, 6)),
        {"event": "restart", "cause": "rank 0 was killed", "lost_steps": 3, "attempt": 1},
        step_event(4, 100, 1, loss="nan"),
        step_event(5, 100, 1, loss=1.25),
        {"event": "loss_spike", "step": 5, "loss": 9.0, "usual": 2.0},
        {"event": "overflow", "step": 4, "tensor": "embed.weight", "loss_scale": 2.0},
        {"event": "slow_rank", "rank": 3, "from_step": 2, "step": 5, "others_wait": 0.4},
        {"event": "bad_checkpoint", "problem": "weights-00000 has another hash"},
        {"event": "failed", "cause": "rank 0 raised OSError"},
    ]
    folder = write_run(config("layout.dp_replicate=1"), events=events)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    run = read_run(folder)
    assert [event["loss"] for event in run.steps][-2:] == ["nan", 1.25]
    page = run_page(run)
    valid(page)
    text = text_of(page)
    for said in (
        "Failed after step 5 of 100: rank 0 raised OSError.",
        "The ranks were restarted once, and recomputed 3 steps: rank 0 was killed.",
        "The loss jumped at step 5.",
        "1 steps were skipped since gradients were not finite",
        "Rank 3 was slow from step 2 to 5, the others waited for it 40% of the time.",
        "A checkpoint was bad: weights-00000 has another hash.",
        "events.jsonl was cut off or damaged: one line cannot be read.",
    ):
        assert said in text, said


def test_a_run_that_never_began(config):
    folder = write_run(config("layout.dp_replicate=1"), events=[], profile=False)
    (folder / "events.jsonl").unlink()
    text = text_of(run_page(read_run(folder)))
    assert "No step was finished." in text
    assert "the run ended before its first step" in text


@pytest.mark.parametrize("content", ["{", '{"schema": 9, "ledgers": []}', "[]", '{"schema": 1}'])
def test_a_damaged_profile_is_told(config, content):
    folder = write_run(config("layout.dp_replicate=1"))
    (folder / "ledger.json").write_text(content)
    assert "ledger.json cannot be read" in text_of(run_page(read_run(folder)))


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"plan\.json and events\.jsonl are missing"):
        report([tmp_path])
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_the_trace_of_a_run(config, tmp_path, capsys):
    folder = write_run(config("layout.dp_replicate=1"))
    trace = tmp_path / "trace.json"
    assert main(["report", str(folder), "--trace", str(trace)]) == 0
    assert f"page: {folder}/report/index.html" in capsys.readouterr().out
    processes = {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert len(processes) == 2
    assert main(["report", str(folder), str(folder), "--trace", str(trace)]) == 2
    (folder / "ledger.json").unlink()
    assert main(["report", str(folder), "--trace", str(trace)]) == 2


def test_several_runs_side_by_side(config):
    runs = [
        read_run(write_run(config("layout.dp_replicate=1", "log.name=one"))),
        read_run(write_run(config(*PIPELINE, "layout.dp_replicate=1", "log.name=two"))),
    ]
    page = comparison_page(runs)
    valid(page)
    assert {"loss-step", "loss-time", "speed", "causes", "peaks"} <= set(page.figures)
    assert {"timeline-0", "timeline-1"} <= set(page.figures)
    differ = page.sections[1].html()
    assert "layout.pp" in differ
    assert "train.batch" in differ
    assert "train.lr" not in differ
    assert "model.dim" not in differ


def test_layouts_side_by_side():
    rows = [
        {
            "layout": label,
            "step_time_s": seconds,
            "step_times_s": [seconds * 0.9, seconds, seconds * 1.1],
            "tokens_per_s": 100 / seconds,
            "predicted_step_time_s": 0.5,
            "peak_bytes": [1000, 2000],
            "predicted_peak_bytes": [900, 2100],
        }
        for label, seconds in (("tp2 mb1", 0.6), ("dp2 mb1", 0.4))
    ]
    page = layouts_page({"machine": "two cores", "rows": rows})
    assert valid(page) == 2
    (drawn,) = page.figures["layouts"]
    assert drawn["layout"]["yaxis"]["ticktext"] == ["dp2 mb1", "tp2 mb1"]
    assert "Fastest is dp2 mb1 , 1.50 times" in text_of(page)
    assert "500 ms (+25%)" in str(drawn)
    said = "The mean error of the predictions is 21%; the largest is 25% too long."
    assert said in text_of(page)


def test_an_empty_section_is_left_out():
    page = Page("Nothing", "at all")
    page.section("none", "None", "", "")
    assert page.sections == []


@pytest.mark.slow
def test_a_simulation_beside_its_prediction(tmp_path, capsys):
    out = tmp_path / "simulation.html"
    sizes = ["model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=4"]
    words = [*sizes, "train.batch=4", "train.seq_len=32", "layout.pp=2", "layout.tp=2"]
    words += ["layout.dp_replicate=1", "cluster.preset=h100-sxm", "--world", "4"]
    assert main(["simulate", *words, "--html", str(out)]) == 0
    html = out.read_text()
    main_part = html.partition("<main ")[2].partition("</main>")[0]
    assert "Every message and every FLOP of the simulated ranks is the program" in main_part
    assert "Memory of a rank over one step, simulated" in main_part
    assert "<h1>Simulation of 4 ranks</h1>" in html
    packed = re.search(r'id="figures">([^<]+)<', html)[1]
    found = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert any(trace["name"] == "predicted" for trace in found["memory"][0]["data"])
    for figures in found.values():
        for one in figures:
            go.Figure(one)
