"""What lm-evaluation-harness asks: the arithmetic, and the adapter beside the library's own."""

import importlib.util
import json

import pytest
import torch
from torch.nn import functional as F

from hf_folders import TEXTS, hf_folder, model_of, write_run
from meshwright.cli import main
from meshwright.data import load_tokenizer
from meshwright.errors import ConfigError
from meshwright.evaluate.requests import Ask, Ending, answer, continued, rolling
from meshwright.models.generate import generate

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
metadata: {{version: 1.0}}
"""
QUESTIONS = [
    {"question": "def f(x):", "choices": [" return x", " fox"], "answer": 0},
    {"question": "the quick brown", "choices": [" return", " fox", " naïve"], "answer": 1},
    {"question": "日本語", "choices": [" 🙂", "語 def"], "answer": 0},
]


@pytest.fixture(autouse=True)
def _the_same_weights():
    torch.manual_seed(0)


def ids_of(*shape, seed=0):
    return torch.randint(0, 320, shape, generator=torch.Generator().manual_seed(seed)).tolist()


def likelihood(model, context, wanted):
    """One request, as the words say it: alone, without padding or cutting."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *wanted]]))[0, len(context) - 1 : -1]
    logs = F.log_softmax(logits, -1)
    total = sum(logs[at, token].item() for at, token in enumerate(wanted))
    return total, logits.argmax(-1).tolist() == list(wanted)


@pytest.mark.parametrize("batch_tokens", [1, 50, 10_000])
def test_answers_do_not_depend_on_their_company(batch_tokens):
    model = model_of()
    asks = [Ask(ids_of(1 + 5 * n, seed=n), ids_of(1 + n % 4, seed=-n)) for n in range(9)]
    likeliest = generate(model, torch.tensor([asks[3].context]), 3, temperature=0)[0, -3:].tolist()
    asks.append(Ask(asks[3].context, likeliest))
    found = answer(model, asks, 64, batch_tokens)
    for ask, (nats, is_greedy) in zip(asks, found, strict=True):
        expected, greedy = likelihood(model, *ask)
        assert nats == pytest.approx(expected, abs=1e-4)
        assert is_greedy == greedy
    assert [greedy for _, greedy in found].index(True) == 9


def test_a_long_context_is_cut_on_the_left():
    model = model_of()
    context, wanted = ids_of(70), ids_of(5, seed=1)
    cut = [*context, *wanted][-13:-5]
    found = answer(model, [Ask(context, wanted)], 12, 100)[0][0]
    assert found == pytest.approx(likelihood(model, cut, wanted)[0], abs=1e-4)
    whole = answer(model, [Ask(context[:1], context[1:13])], 12, 100)[0][0]
    assert whole == pytest.approx(likelihood(model, context[:1], context[1:13])[0], abs=1e-4)
    for wrong in ([], ids_of(13)):
        with pytest.raises(ConfigError, match=f"wants {len(wrong)} tokens .* reads 1 to 12"):
            answer(model, [Ask(context, wrong)], 12, 100)


def test_rolling_windows():
    """The example of the library's own documentation."""
    found = [([*ask.context, *ask.wanted[:-1]], ask.wanted) for ask in rolling(range(10), -1, 4)]
    assert found == [
        ([-1, 0, 1, 2], [0, 1, 2, 3]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([5, 6, 7, 8], [8, 9]),
    ]
    assert rolling([7, 8], -1, 4) == [Ask([-1], [7, 8])]
    assert rolling([], -1, 4) == []


def test_endings():
    assert Ending.of({}) == Ending(())
    assert Ending.of({"until": "\n", "max_gen_toks": 5}) == Ending(("\n",), 5)
    assert Ending.of({"until": ["a", "b"], "do_sample": False, "temperature": 0.7}).temperature == 0
    assert Ending.of({"temperature": 0.7, "top_p": 0.9}) == Ending((), 256, 0.7, 0.9)
    assert Ending.of({"do_sample": True}).temperature == 1.0
    with pytest.raises(ConfigError, match="num_beams cannot be had"):
        Ending.of({"num_beams": 4})


def test_a_continuation_ends_at_its_stop(tmp_path):
    model, tokenizer = model_of(), load_tokenizer("bytes")
    prompt = tokenizer.encode("def f(x):")

    def go(*words, of=prompt, length=64, **ids):
        return continued(model, tokenizer, of, Ending(*words), length, **{"ends": [256], **ids})

    whole = go((), 30)
    free = generate(model, torch.tensor([prompt]), 30, temperature=0)[0, len(prompt) :].tolist()
    free = free[: free.index(256)] if 256 in free else free
    assert whole == tokenizer.decode(free)
    assert len(whole) > 8
    stop = whole[5:7]
    assert go(("never", stop), 30) == whole.split(stop)[0]
    assert go((), 30, ends=[free[3]]) == tokenizer.decode(free[: free.index(free[3])])
    assert go((), 30, unseen=[free[3]]) == tokenizer.decode(i for i in free if i != free[3])
    assert go((), 6, length=10) == go((), 6, of=prompt[-4:])
    with pytest.raises(ConfigError, match=r"max_gen_toks = 10 leaves no room .* at most 9"):
        go((), 10, length=10)


def words_of(tmp_path, *words):
    return ["eval", str(hf_folder(tmp_path)), *words]


def test_what_cannot_be_is_refused(tmp_path, capsys, monkeypatch):
    words = words_of(tmp_path)
    for more, message in {
        ("--tasks", "x", "--stride", "3"): "--stride is not for --tasks",
        ("--num-fewshot", "3"): "--num-fewshot is for --tasks",
    }.items():
        assert main([*words, *more]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*words, "--tasks", "x"]) == 2
    assert "pip install 'meshwright[lm-eval]'" in capsys.readouterr().err


def requests_of(kind, *args):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, index) for index, one in enumerate(args)]


def test_the_adapter_answers_as_the_library_does(tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[lm-eval]'")
    pytest.importorskip("accelerate", reason="without accelerate lm_eval has no HFLM")
    from lm_eval.models.huggingface import HFLM

    from meshwright.checkpoint.weights import load_model
    from meshwright.evaluate.harness import MeshwrightLM

    folder = hf_folder(tmp_path)
    # Its cache takes windows with the same inputs, as a periodic text has, for one request.
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", logits_cache=False)
    ours = MeshwrightLM(load_model(folder).eval(), load_tokenizer(str(folder)), 64, 200)
    assert ours.max_length == theirs.max_length
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.prefix_token_id != ours.eot_token_id == theirs.eot_token_id
    pairs = [(doc["question"], choice) for doc in QUESTIONS for choice in doc["choices"]]
    pairs += [
        ("", "the fox"),
        ("ends in a space ", "x"),
        (TEXTS[0], " return"),
        ("a", TEXTS[0][:90]),
    ]
    expected = theirs.loglikelihood(requests_of("loglikelihood", *pairs))
    found = ours.loglikelihood(requests_of("loglikelihood", *pairs))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], rel=1e-5)

    texts = [(text,) for text in (*TEXTS, "short", "x")]
    asked = requests_of("loglikelihood_rolling", *texts)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(
        theirs.loglikelihood_rolling(asked), rel=1e-5
    )
    settings = {"until": ["x"], "max_gen_toks": 20}
    prompts = [(prompt, settings) for prompt in ("def f", "the quick", TEXTS[1])]
    asked = requests_of("generate_until", *prompts)
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_tasks_from_local_files(tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[lm-eval]'")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    choices = {"kind": "multiple_choice", "target": "{{answer}}"}
    more = 'doc_to_choice: "{{choices}}"'
    (tasks / "a.yaml").write_text(TASK.format(name="ours_choice", rows=rows, more=more, **choices))
    ending = 'generation_kwargs: {until: ["."], max_gen_toks: 8}'
    until = {"kind": "generate_until", "target": "{{question}}", "more": ending}
    (tasks / "b.yaml").write_text(TASK.format(name="ours_until", rows=rows, **until))
    run = write_run(tmp_path / "run")
    words = ["eval", str(run), "--include-path", str(tasks), "--seq-len", "64"]

    assert main([*words, "--tasks", "ours_choice,ours_until", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n-samples"]["ours_choice"]["effective"] == 3
    from meshwright.checkpoint.weights import load_model

    model, tokenizer = load_model(run).eval(), load_tokenizer("bytes")
    right = 0
    for doc in QUESTIONS:
        context = tokenizer.encode(doc["question"])
        each = [likelihood(model, context, tokenizer.encode(" " + c))[0] for c in doc["choices"]]
        right += max(each) == each[doc["answer"]]
    assert found["results"]["ours_choice"]["acc,none"] == pytest.approx(right / 3)
    assert found["results"]["ours_until"]["exact_match,none"] == 0

    assert main([*words, "--tasks", "ours_choice", "--num-fewshot", "1", "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "ours_choice" in shown
    assert "acc" in shown
    assert main([*words, "--tasks", "ours_choices"]) == 2
    assert "nearest legal: ours_choice" in capsys.readouterr().err
