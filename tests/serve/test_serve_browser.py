"""The page of `plan --serve` in a browser: a plan asked, pinned, read, copied and run."""

import contextlib
import io
import json
import shlex
import subprocess
import sys

import pytest

from meshwright.cli import main
from meshwright.serve.answer import answer
from meshwright.serve.app import HAS_UI
from test_report_browser import BROWSER, NAMES, axe, browser, violations  # noqa: F401

pytestmark = [
    pytest.mark.early,
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: {NAMES}"),
    pytest.mark.skipif(not HAS_UI, reason="the extra ui is not installed"),
]
LARGE = ["model.preset=llama-3-70b", "cluster.preset=h100-sxm", "train.batch=1024"]
SMALL = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", "train.batch=64"]
IN_THE_ADDRESS = "#" + "&".join(f"w={word}" for word in SMALL)
WIDE = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""


@pytest.fixture(scope="module")
def address():
    """The address of a server in a process of its own, which begins with the small cluster."""
    words = [sys.executable, "-m", "meshwright", "plan", "--serve", *LARGE, "cluster.nodes=8"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().split()[0]
        server.terminate()


@pytest.fixture
def opened(browser, address):  # noqa: F811
    """Return a function that opens the page, and what it said and asked."""
    contexts = []

    def open_at(state="", width=1280, **more):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            permissions=["clipboard-read", "clipboard-write"],
            **more,
        )
        contexts.append(context)
        shown = context.new_page()
        said, asked = [], []
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(address + state)
        drawn(shown, 1)
        return shown, said, asked

    yield open_at
    for context in contexts:
        context.close()


def drawn(shown, times):
    """Wait until the page has drawn so many answers."""
    shown.wait_for_function(
        f"() => Number(document.documentElement.dataset.drawn) >= {times}", timeout=60_000
    )


def best(shown):
    return shown.locator("#results table button").first.inner_text()


def test_plan_pin_read_copy_and_run(opened, address, capsys):
    shown, said, asked = opened()
    assert best(shown) == answer({"words": [*LARGE, "cluster.nodes=8"]})["ranked"][0]["label"]
    took = []
    for at, nodes in enumerate((16, 32, 64), 2):
        shown.fill("[name='cluster.nodes']", str(nodes))
        drawn(shown, at)
        took.append((nodes * 8, int(shown.evaluate("document.documentElement.dataset.took"))))
    shown.fill("[name='layout.tp']", "8")
    drawn(shown, 5)
    took.append(("512, tp 8", int(shown.evaluate("document.documentElement.dataset.took"))))
    with capsys.disabled():
        print("\nfrom a change to the picture, ms:", took)
    words = [*LARGE, "cluster.nodes=64", "layout.tp=8"]
    expected = answer({"words": words})["ranked"][0]["label"]
    assert best(shown) == expected
    assert " tp8 " in f" {expected} "
    shown.click("[data-copy=command]")
    command = shown.evaluate("() => navigator.clipboard.readText()")
    run = [sys.executable, "-m", *shlex.split(command), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ranked"][0]["label"] == expected
    assert not said
    assert all(url.startswith((address, "data:")) for url in asked)
    # The address is the state.
    again, _, _ = opened(shown.url.partition("/#")[2] and "#" + shown.url.partition("#")[2])
    assert best(again) == expected
    assert again.input_value("[name='layout.tp']") == "8"


def test_two_side_by_side_why_not_and_refusals(opened):
    shown, said, _ = opened()
    shown.locator("#results table button").nth(1).press("Enter")
    drawn(shown, 2)
    assert shown.locator(".sides > section").count() == 2
    assert shown.locator(".sides svg rect").count() > 20
    shown.fill("[name=why]", "shard64 zero3 mb64")
    drawn(shown, 3)
    assert "64" in shown.locator(".sides .why").last.inner_text()
    shown.fill("[name='train.batch']", "9" * 30)
    shown.wait_for_selector("#error:not([hidden])")
    assert "train.batch" in shown.inner_text("#error")
    shown.fill("[name='train.batch']", "1024")
    drawn(shown, 4)
    assert shown.locator("#error").is_hidden()
    # The browser itself says that an answer was a refusal.
    assert all("422" in one for one in said)


def test_fields_pins_and_what_an_old_answer_looks_like(opened):
    shown, _, _ = opened(IN_THE_ADDRESS)
    # The heading over the curve is never over nothing.
    assert shown.locator("#curve").inner_text()
    hint = shown.get_attribute("[name='train.seq_len']", "placeholder")
    assert int(hint) == int(answer({"words": SMALL})["defaults"]["train.seq_len"])
    assert "bf16" in shown.locator("[name='train.precision'] option").first.inner_text()
    shown.fill("[name='layout.dp_replicate']", "2")
    drawn(shown, 2)
    assert "dp2" in best(shown)
    shown.fill("[name='layout.dp_replicate']", "")
    shown.fill("[name='cluster.price']", "2.5")
    shown.fill("[name=tokens]", "300B")
    shown.wait_for_selector("#curve th:has-text('days for 300B')", timeout=60_000)
    assert shown.locator("#curve th", has_text="cost").count() == 1
    faded = "() => Number(getComputedStyle(document.getElementById('results')).opacity)"
    assert shown.evaluate(faded) == 1
    shown.fill("[name='layout.tp']", "7")
    shown.wait_for_selector("#error:not([hidden])")
    assert shown.evaluate(faded) < 0.5  # it answers an earlier question
    shown.fill("[name='layout.tp']", "")
    shown.wait_for_selector("#error", state="hidden")
    assert shown.evaluate(faded) == 1


def test_bars_show_intervals_and_memory_its_limit(opened):
    shown, _, _ = opened(IN_THE_ADDRESS)
    rows = shown.locator(".ranking tbody tr").count()
    assert shown.locator(".ranking path.interval").count() == 2 * rows
    limits = shown.locator(".sides svg text", has_text="limit 80.0 GiB")
    assert limits.count() == 1


def test_a_phone_shows_why_not(opened):
    shown, _, _ = opened(IN_THE_ADDRESS, width=390)
    for row in shown.locator(".ranking tbody tr").all():
        box = row.locator("td").last.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_dark_and_by_keys(opened, scheme):
    shown, said, _ = opened(width=390, color_scheme=scheme)
    assert shown.evaluate(WIDE) <= 0
    colour = shown.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 23, 29)")
    shown.keyboard.press("Tab")
    assert shown.evaluate("() => document.activeElement.className") == "skip"
    shown.keyboard.press("Tab")
    assert shown.evaluate("() => document.activeElement.name") == "model.preset"
    assert not said


def test_a_config_is_dropped(opened, tmp_path):
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
    sizes |= {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    shown, _, _ = opened()
    shown.set_input_files("#file", path)
    drawn(shown, 2)
    assert "6.74B parameters" in shown.inner_text("#asked")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """The page that `plan --html` writes, and the document that it prints."""
    path = tmp_path_factory.mktemp("frozen") / "plan.html"
    words = [
        "plan",
        *SMALL,
        "layout.microbatch=1",
        "--devices",
        "4..8",
        "--tokens",
        "300T",
        "--top",
        "3",
    ]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*words, "--html", str(path), "--json"]) == 0
    return path, json.loads(out.getvalue())


def test_frozen_it_shows_what_the_tokens_cost(browser, tmp_path):  # noqa: F811
    """Without --devices, --tokens and --price changed nothing on the page."""
    path, out = tmp_path / "plan.html", io.StringIO()
    device = next(word for word in SMALL if word.startswith("cluster.preset=")).partition("=")[2]
    asked = ["--tokens", "300B", "--price", f"{device}=2.5"]
    with contextlib.redirect_stdout(out):
        assert main(["plan", *SMALL, *asked, "--top", "1", "--html", str(path), "--json"]) == 0
    cost = json.loads(out.getvalue())["answers"]["tokens"]
    shown = browser.new_page()
    shown.goto(path.as_uri())
    drawn(shown, 1)
    assert "Training on 300B tokens" in shown.locator("h2").all_inner_texts()
    names = shown.locator("#results > .facts dt").all_inner_texts()
    values = shown.locator("#results > .facts dd").all_inner_texts()
    printed = dict(zip(names, (value.split("\n")[0] for value in values), strict=True))
    assert list(printed) == ["Days", "Device hours", "Cost"]
    assert float(printed["Days"]) == pytest.approx(cost["days"], rel=0.01)
    units = {"": 1.0, "K": 1e3, "M": 1e6}
    for name, value in (("Device hours", cost["device_hours"]), ("Cost", cost["cost"])):
        number = printed[name].rstrip("KM")
        unit = units[printed[name][len(number) :]]
        assert float(number) * unit == pytest.approx(value, rel=0.01)
    shown.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_frozen_it_shows_the_plan_and_asks_nobody(browser, frozen, axe, scheme):  # noqa: F811
    path, made = frozen
    context = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 900})
    shown = context.new_page()
    asked, said = [], []
    shown.on("request", lambda request: asked.append(request.url))
    shown.on("console", lambda message: said.append(message.text))
    shown.goto(path.as_uri())
    drawn(shown, 1)
    assert best(shown) == made["ranked"][0]["label"]
    assert shown.locator("#curve svg").count() == 1
    axes = shown.locator("#curve svg text").all_text_contents()
    assert "devices" in axes
    assert any(text.endswith("tokens/s") for text in axes)
    assert "e+" not in shown.inner_text("#results")
    # What was asked is a text, not a control that nobody answers.
    assert shown.locator("form").is_hidden()
    told = shown.inner_text("#given-words")
    assert all(word in told for word in ("llama-3-8b", "h100-sxm", "64", "layout.microbatch"))
    # What was planned is all there: a second layout beside the first needs no server.
    shown.locator("#results table button").nth(1).press("Enter")
    heads = shown.locator(".sides h3").all_inner_texts()
    assert [one["label"] for one in made["ranked"][:2]] == [h for h in heads if " mb1" in h]
    assert made["command"] == shown.inner_text("#train")
    assert shown.evaluate(WIDE) <= 0
    assert violations(shown, axe) == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert not said
    context.close()


def test_axe_finds_nothing_on_the_served_page(opened, axe):  # noqa: F811
    shown, _, _ = opened()
    assert violations(shown, axe) == []
