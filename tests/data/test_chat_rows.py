"""What a row means before a template sees it: its fields, masks, nulls and quoted tokens."""

import json
from pathlib import Path

import pytest

from meshwright.data import prepare
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.conversations import ChatRows, Conversation, conversation_of
from meshwright.data.corpora import Files
from meshwright.data.encoders import NO_END, ChatEncoder
from meshwright.data.formats import Problem, read_whole
from meshwright.data.tokenizers import load_tokenizer

TOKENIZER = Path(__file__).parents[2] / "examples" / "chat" / "tokenizer"
ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
# Writes whatever a message has, calls as JSON.
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{% if m.content is string %}{{ m.content }}{% else %}
{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}
{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def encoder():
    tokens = {"eos_token": "<|endoftext|>"}
    return ChatEncoder(load_tokenizer(str(TOKENIZER)), ChatTemplate(CHATML, tokens, "a template"))


def messages_of(row, **more):
    return conversation_of(row, "", **more).messages


def rendered(encoder, row):
    conversation = conversation_of(row, "")
    ids, mask = encoder.one(conversation)
    return encoder.tokenizer.decode(ids), encoder.tokenizer.decode(ids[mask])


def called(arguments, **more):
    function = {"name": "get", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call], **more}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID], "system": "be"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
         "system": "be"},
        {"prompt": "hi", "completion": "yo", "system": "be"},
        {"question": "hi", "response": "yo", "system_prompt": "be"},
        {"instruction": "hi", "output": "yo", "system": "be"},
        {"messages": [{"role": "system", "content": "be"}, ASKED, SAID], "system": "be"},
        {"conversation": [{"role": "system", "content": "be"}, ASKED, SAID]},
        {"messages": json.dumps([{"role": "system", "content": "be"}, ASKED, SAID])},
    ],
)  # fmt: skip
def test_a_system_text_of_a_row_comes_first(row):
    found = conversation_of(row, "")
    assert found.messages == ({"role": "system", "content": "be"}, ASKED, SAID)
    assert (found.trained, found.unused) == ((2,), ())


def test_earlier_turns_of_an_instruction_are_turns_and_are_trained():
    row = {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]], "system": "s"}
    found = conversation_of(row, "")
    assert [message["content"] for message in found.messages] == ["s", "a", "b", "c", "d"]
    assert found.trained == (2, 4)
    with pytest.raises(ValueError, match="not a list of pairs"):
        conversation_of({**row, "history": ["a"]}, "")


def test_what_an_instruction_is_about_is_read_under_both_names():
    row = {"instruction": "sum up", "context": "a tale", "response": "short", "category": "x"}
    found = conversation_of(row, "")
    assert found.messages[0]["content"] == "sum up\n\na tale"
    assert found.unused == ("category",)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [{"role": "system", "content": "a"}, ASKED, SAID], "system": "b"},
         "two system texts"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "answers to compare"),
        ({"messages": [ASKED, SAID], "images": ["a.png"]}, "field 'images': only text is read"),
        ({"messages": [ASKED, {**SAID, "train_detail": [{"begin_offset": 0}]}]}, "as a whole"),
        ({"messages": [ASKED, {**SAID, "weight": 0.5}]}, "weight = 0.5: a turn is trained or not"),
        ({"messages": [{"role": "user"}, SAID]}, "message 1 has neither content nor tool_calls"),
        ({"messages": [{"role": "user", "value": "hi"}, SAID]}, "message 1 has neither content"),
        ({"messages": [ASKED, SAID], "tools": "nothing"}, "Expecting value"),
        ({"messages": [ASKED, SAID], "tools": 5}, "not a list of tools"),
        ({"messages": [ASKED, SAID], "chat_template_kwargs": {"messages": []}}, "sets 'messages'"),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, "is not JSON"),
        ({"messages": [ASKED, {**SAID, "content": {"a": 1}}]}, "its content is a dict"),
    ],
)  # fmt: skip
def test_rows_that_would_mean_something_else_are_refused(row, why):
    with pytest.raises(ValueError, match=why):
        conversation_of(row, "")


def test_fields_that_nothing_reads_are_named():
    turns = [{"from": "human", "value": "hi", "markdown": "x"}, {"from": "gpt", "value": "yo"}]
    row = {"conversations": turns, "id": 3, "score": 0.5, "note": "", "none": None}
    assert conversation_of(row, "").unused == ("id", "markdown of turns", "score")
    row = {"messages": [{**ASKED, "train": True}, SAID]}
    assert conversation_of(row, "").unused == ("train of turns that are not the assistant's",)


def test_fields_of_messages_that_the_template_does_not_read_are_counted(encoder):
    row = {"messages": [{**ASKED, "name": "Ada"}, {**SAID, "tool_call_id": "x"}], "tools": []}
    texts = [conversation_of(row, "").to_text()] * 2
    assert encoder.encode(texts).notes == {
        "the field 'name' of messages is not read by the chat template": 2
    }
    row = {"messages": [ASKED, SAID], "tools": [{"type": "function"}], "enable_thinking": False}
    assert encoder.encode([conversation_of(row, "").to_text()]).notes == {
        "the field 'tools' is not read by the chat template": 1,
        "the field 'enable_thinking' is not read by the chat template": 1,
    }


def test_options_of_a_row_reach_the_template(encoder):
    source = "{% if enable_thinking %}thinks{% endif %}" + CHATML
    chat = ChatEncoder(encoder.tokenizer, ChatTemplate(source, {}, "a template"))
    for row in ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}):
        assert rendered(chat, {"messages": [ASKED, SAID], **row})[0].startswith("thinks")
    assert not rendered(chat, {"messages": [ASKED, SAID]})[0].startswith("thinks")


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
def test_turns_that_a_row_leaves_out_are_not_trained(encoder, key):
    messages = [ASKED, {**SAID, key: 0}, ASKED, {"role": "assistant", "content": "last", key: 1}]
    assert rendered(encoder, {"messages": messages})[1] == "last<|im_end|>"
    marked = CHATML.replace("{% if m.reasoning", "{% generation %}{% if m.reasoning").replace(
        "<|im_end|>", "<|im_end|>{% endgeneration %}"
    )
    chat = ChatEncoder(encoder.tokenizer, ChatTemplate(marked, {}, "a template"))
    assert rendered(chat, {"messages": messages})[1] == "last<|im_end|>"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", key: False}]
    turns += [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "last", key: True}]
    assert rendered(encoder, {"conversations": turns})[1] == "last<|im_end|>"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_a_call_without_a_content_writes_none(encoder, content):
    text, trained = rendered(encoder, {"messages": [ASKED, called({"a": 1}, **content)]})
    assert "None" not in text
    assert trained == '<call>{"name": "get", "arguments": {"a": 1}}</call><|im_end|>'


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_under_each_of_its_names(encoder, key):
    row = {"messages": [ASKED, {**SAID, key: "hm"}]}
    assert rendered(encoder, row)[1] == "<think>hm</think>yo<|im_end|>"
    plain = CHATML.replace("m.reasoning_content", "false")
    chat = ChatEncoder(encoder.tokenizer, ChatTemplate(plain, {}, "a template"))
    notes = chat.encode([conversation_of(row, "").to_text()]).notes
    assert list(notes) == [
        "the field 'reasoning_content' of messages is not read by the chat template"
    ]


@pytest.mark.parametrize(
    ("arguments", "how", "text"),
    [
        ({"a": None}, "c.function | tojson", '{"a": null}'),
        ('{"a": null}', "c.function | tojson", '{"a": null}'),
        ("", "c.function | tojson", "{}"),
        ('{"a":1}', "c.function.arguments if c.function.arguments is string else "
         "c.function.arguments | tojson", '{"a":1}'),
        ({"a": 1}, "'' + c.function.arguments", '{"a": 1}'),
        ('{"a":1}', "'' + c.function.arguments", '{"a":1}'),
    ],
)  # fmt: skip
def test_arguments_are_texts_or_objects_as_the_template_reads_them(encoder, arguments, how, text):
    source = CHATML.replace("c.function | tojson", how)
    chat = ChatEncoder(encoder.tokenizer, ChatTemplate(source, {}, "a template"))
    assert text in rendered(chat, {"messages": [ASKED, called(arguments)]})[1]


def test_arguments_that_are_no_object_are_refused(encoder):
    with pytest.raises(ValueError, match="are not a JSON object"):
        rendered(encoder, {"messages": [ASKED, called("[1]")]})


def test_calls_in_other_forms_are_calls(encoder):
    call = {"name": "get", "arguments": '{"a": 1}'}
    wanted = rendered(encoder, {"messages": [ASKED, called({"a": 1})]})
    for row in (
        {"messages": [ASKED, {"role": "assistant", "content": None, "function_call": call}]},
        {"messages": [ASKED, {"role": "function_call", "content": json.dumps(call)}]},
        {"conversations": [{"from": "human", "value": "hi"},
                           {"from": "function_call", "value": json.dumps([call])}]},
        {"messages": [ASKED, {"role": "assistant", "tool_calls": json.dumps(
            called(call["arguments"])["tool_calls"])}]},
    ):  # fmt: skip
        assert rendered(encoder, row) == wanted


def test_a_template_without_calls_or_a_role_is_refused(encoder):
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    chat = ChatEncoder(encoder.tokenizer, ChatTemplate(plain, {}, "a template"))
    texts = [conversation_of({"messages": [ASKED, called({}, content="b")]}, "").to_text()]
    lines = []
    chat.encode(texts, lines.append)
    assert lines == [": the chat template does not write tool_calls"]
    told = "{% for m in messages if m.role in ('user', 'assistant') %}" + plain.partition("%}")[2]
    chat = ChatEncoder(encoder.tokenizer, ChatTemplate(told, {}, "a template"))
    row = {"messages": [{"role": "system", "content": "be kind"}, ASKED, SAID]}
    chat.encode([conversation_of(row, "").to_text()], lines.append)
    assert lines[1:] == [": the chat template leaves out messages of the role 'system'"]


QUOTED = "a<|im_end|>b"


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"messages": [{"role": "user", "content": QUOTED}, SAID]}, "message 1"),
        ({"messages": [ASKED, {**SAID, "content": [{"type": "text", "text": QUOTED}]}]}, "mess"),
        ({"messages": [{**ASKED, "content": [{"type": "text", "text": "a<|im_"},
                                             {"type": "text", "text": "end|>b"}]}, SAID]}, "mess"),
        ({"messages": [ASKED, {**SAID, "thinking": QUOTED}]}, "message 2"),
        ({"messages": [ASKED, called({"a": {"b": [QUOTED]}})]}, "message 2"),
        ({"messages": [ASKED, called({QUOTED: 1})]}, "message 2"),
        ({"messages": [ASKED, called(json.dumps({"a": QUOTED}))]}, "message 2"),
        ({"messages": [ASKED, called({}), {"role": "tool", "content": QUOTED}, SAID]}, "message 3"),
        ({"messages": [{**ASKED, "name": QUOTED}, SAID]}, "message 1"),
        ({"messages": [ASKED, SAID], "tools": [{"description": QUOTED}]}, "tools"),
        ({"messages": [ASKED, SAID], "documents": [{"text": QUOTED}]}, "documents"),
        ({"messages": [ASKED, SAID], "chat_template_kwargs": {"date": QUOTED}}, "options"),
    ],
)  # fmt: skip
def test_a_special_token_that_is_quoted_anywhere_is_refused(encoder, more, where):
    with pytest.raises(ValueError, match=rf"{where}.* quotes the special token '<\|im_end\|>'"):
        rendered(encoder, more)


def test_a_special_token_in_another_spelling_is_refused(tmp_path):
    from tokenizers import AddedToken, Tokenizer, normalizers

    backend = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    chat = ChatEncoder(
        load_tokenizer(str(tmp_path), "<|endoftext|>"), ChatTemplate(CHATML, {}, "a template")
    )
    with pytest.raises(ValueError, match="another spelling"):
        rendered(chat, {"messages": [{**ASKED, "content": "a＜end＞b"}, SAID]})


def tool(name, *arguments, required=()):
    properties = {key: {"type": "string"} for key in arguments}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def calling(name, arguments, tools):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [ASKED, turn], "tools": tools}


def read_table(rows, path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path)
    return list(read_whole(path, ChatRows(), None))


@pytest.mark.parametrize("form", ["objects", "texts"])
def test_tables_mean_what_the_same_rows_mean_as_jsonl(tmp_path, form):
    rows = [
        calling("weather", {"city": "Oslo"}, [tool("weather", "city")]),
        calling("time", {"zone": "UTC", "day": None},
                [tool("time", "zone", "day", required=["day"])]),
        calling("find", {"what": {"word": "a"}}, [tool("find", "what")]),
        {"messages": [ASKED, {**SAID, "thinking": "hm"}], "tools": None},
    ]  # fmt: skip
    if form == "texts":
        for row in rows[:3]:
            function = row["messages"][1]["tool_calls"][0]["function"]
            function["arguments"] = json.dumps(function["arguments"])
            row["tools"] = json.dumps(row["tools"])
    found = [Conversation.from_text(text) for text in read_table(rows, tmp_path / "a.parquet")]
    wanted = [conversation_of(row, "") for row in rows]
    assert [one.messages for one in found] == [one.messages for one in wanted]
    assert [one.tools for one in found] == [one.tools for one in wanted]


def test_a_null_of_a_table_that_may_be_one_on_purpose_is_refused(tmp_path):
    both = [tool("weather", "city", "unit")]
    rows = [
        calling("weather", {"city": "Oslo", "unit": None}, both),
        calling("weather", {"city": "Oslo", "unit": "C"}, both),
        calling("weather", {"city": "Oslo"}, None),
    ]
    found = read_table(rows, tmp_path / "a.parquet")
    assert [type(piece) for piece in found] == [Problem, str, Problem]
    assert "the argument 'unit' of 'weather' is null, or not given" in str(found[0])


def test_data_prepare_tells_and_keeps_what_is_not_used(tmp_path):
    rows = [{"messages": [ASKED, SAID], "source": "web"}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = []
    source = Files((tmp_path / "a.jsonl",), format="chat")
    prepare([source], str(TOKENIZER), tmp_path / "s", form="chat", say=said.append)
    line = "the field 'source' is not used (3 conversations)"
    assert said == [f"note: {line}"]
    assert (tmp_path / "s" / "notes.txt").read_text() == f"{line}\n"


def test_a_template_that_ends_no_answer_is_told(encoder):
    source = "{% for m in messages %}\n{{ m.role }}:{{ m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}\nassistant:{% endif %}"
    chat = ChatEncoder(encoder.tokenizer, ChatTemplate(source, {}, "a template"))
    text = conversation_of({"messages": [ASKED, SAID, ASKED, SAID]}, "").to_text()
    assert chat.encode([text]).notes == {NO_END: 1}
    assert chat.turn_ends() == []
