"""Templates of published kinds: several turns, where answers are, and random conversations."""

import importlib.util
from pathlib import Path

import pytest

from meshwright.data.chat_template import ChatTemplate
from meshwright.data.conversations import conversation_of
from meshwright.data.encoders import ChatEncoder
from meshwright.data.tokenizers import load_tokenizer
from test_chat import ASKED, CHAT, CHATML, SAID

pytest.importorskip("transformers")
from benchmarks.conversations import NAMES, compare, templates_of

LOOP = "{% for m in messages %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
TEMPLATES = {
    # As Qwen3's: a thought before the last answer alone.
    "earlier thoughts dropped": """{% set last = messages | length - 1 %}
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 == last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content or '' }}"""
    + CALLS
    + """<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    # As Phi-3's: the end of the document follows where no answer is asked.
    "an end of all": LOOP
    + """<|im_start|>{{ m.role }}
{{ m.content or '' }}"""
    + CALLS
    + """{{ m.reasoning_content or '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% else %}{{ eos_token }}{% endif %}""",
    # As DeepSeek-V3's: the prompt has the beginning of a thought, which no answer has.
    "a thought in the prompt": LOOP
    + "{% if m.role == 'assistant' %}<|im_start|>a:{{ m.content or '' }}"
    + CALLS
    + "<|im_end|>{% else %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>a:<think>\n{% endif %}"
    "{# m.reasoning_content #}",
    # As Nemotron's: a thought in both, of which the prompt's is open.
    "a thought in both": LOOP
    + "{% if m.role == 'assistant' %}<|im_start|>a:<think>{{ m.reasoning_content or '' }}</think>"
    "{{ m.content or '' }}"
    + CALLS
    + "<|im_end|>{% else %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>a:<think>\n{% endif %}",
    # As gpt-oss': several parts of an answer, another end of the last one.
    "channels": LOOP + "{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "<|im_start|>assistant:thought:{{ m.thinking }}<|im_end|>{% endif %}"
    "<|im_start|>assistant:said:{{ m.content or '' }}"
    + CALLS
    + "{{ eos_token if loop.last else '<|im_end|>' }}"
    "{% else %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(CHAT / "tokenizer"))


def trained(tokenizer, source, *messages):
    tokens = {"eos_token": "<|endoftext|>"}
    chat = ChatEncoder(tokenizer, ChatTemplate(source, tokens, "a template"))
    ids, mask = chat.one(conversation_of({"messages": list(messages)}, ""))
    return tokenizer.decode(ids[mask])


THOUGHT = {**SAID, "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("earlier thoughts dropped", "yo<|im_end|><think>\nhm\n</think>\n\nyo<|im_end|>"),
        ("an end of all", "yohm<|im_end|>yohm<|im_end|>"),
        (
            "a thought in both",
            "<think>hm</think>yo<|im_end|><think>hm</think>yo<|im_end|>",
        ),
        ("a thought in the prompt", "yo<|im_end|>yo<|im_end|>"),
        (
            "channels",
            "said:yo<|im_end|>thought:hm<|im_end|><|im_start|>assistant:said:yo<|endoftext|>",
        ),
    ],
)
def test_answers_of_templates_that_write_earlier_turns_otherwise(tokenizer, kind, wanted):
    assert trained(tokenizer, TEMPLATES[kind], ASKED, THOUGHT, ASKED, THOUGHT) == wanted


def test_answers_in_loops_of_other_forms(tokenizer):
    """Loops over what is not a message, within macros and captured texts, change nothing."""
    capturing = CHATML.replace("+ m.content +", "+ text +").replace(
        LOOP,
        LOOP + "{% set text %}{% for c in m.content %}{{ c }}{% endfor %}{% endset %}",
    )
    looking_back = (
        "{% for m in messages %}{% for n in messages[:loop.index0] %}{% if false %}{{ n }}"
        "{% endif %}{% endfor %}" + CHATML.removeprefix(LOOP)
    )
    stopping = CHATML.replace(
        "{% endfor %}", "{% if m.role == 'user' %}{% continue %}{% endif %}{% endfor %}"
    )
    for source in (CHATML, capturing, looking_back, stopping):
        assert trained(tokenizer, source, ASKED, SAID, ASKED, SAID) == "yo<|im_end|>yo<|im_end|>"


# As DeepSeek-V3's: the first call of all begins the answer, each later one a line.
CALLS_IN_LINES = """{% set ns = namespace(is_first=false) %}{% for m in messages %}
{%- if m.role == 'user' %}<|im_start|>{{ m.content }}{% endif %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}{% for c in m.tool_calls %}
{%- if not ns.is_first %}{{ '<|im_start|>a:' + m.content + '<calls>' + c.function.arguments }}
{%- set ns.is_first = true %}{% else %}{{ '\n' + c.function.arguments }}{% endif %}{% endfor %}
{{- '</calls><|im_end|>' }}{% endif %}
{%- if m.role == 'assistant' and 'tool_calls' not in m %}
{{- '' if loop.previtem.role == 'tool' else '<|im_start|>a:' }}{{ m.content + '<|im_end|>' }}
{%- endif %}{% if m.role == 'tool' %}{{ '<out>' + m.content + '</out>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>a:<think>{% endif %}"""


def calling(content, *values):
    calls = [{"function": {"name": "f", "arguments": {"k": value}}} for value in values]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def test_several_calls_of_an_answer_are_trained_and_a_content_that_is_not_written_is_refused(
    tokenizer,
):
    results = [{"role": "tool", "content": "r"}] * 2
    told = 'hm<calls>{"k": 1}\n{"k": 2}</calls><|im_end|>'
    first = calling("hm", 1, 2)
    assert trained(tokenizer, CALLS_IN_LINES, ASKED, first) == told
    found = trained(tokenizer, CALLS_IN_LINES, ASKED, first, *results, SAID)
    assert found == f"{told}yo<|im_end|>"
    again = trained(tokenizer, CALLS_IN_LINES, ASKED, first, *results, calling("", 3, 4), SAID)
    assert again == f'{told}\n{{"k": 3}}\n{{"k": 4}}</calls><|im_end|>yo<|im_end|>'
    with pytest.raises(ValueError, match="does not write the content of turn 5"):
        trained(tokenizer, CALLS_IN_LINES, ASKED, first, *results, calling("so", 3), SAID)


def outcome_of(templates, count, formats=("jsonl", "parquet")):
    pytest.importorskip("pyarrow")
    outcome = compare(templates, count, 1, formats)
    for name, counts in outcome.items():
        assert not counts.wrong, f"{name}: {counts.wrong[0]}"
        yield name, counts


def test_random_conversations_are_those_of_transformers_or_refused():
    """Through templates as published ones; `benchmarks.conversations` tries those."""
    sources = [(name, source, None) for name, source in TEMPLATES.items()]
    for name, counts in outcome_of([*sources, ("ChatML", CHATML, None)], 40):
        assert counts.kinds["equal texts"] > 40, name
        if name != "ChatML":  # which has no tools, so that rows with calls are refused
            assert counts.kinds["refused"] == 0, counts.reasons


@pytest.mark.slow
def test_random_conversations_through_published_templates():
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed, which has the published templates")
    folder = Path(found.origin).parent / "chat_templates"
    assert len(list(outcome_of(list(templates_of(folder, NAMES)), 60))) >= 12
