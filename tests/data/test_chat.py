"""Conversations as data: forms of rows, templates, masks, whole rows of them, and their store."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import IGNORE, Blend, open_data, open_store, prepare, verify
from meshwright.data.chat_template import ChatTemplate, load_template
from meshwright.data.conversations import Conversation, conversation_of
from meshwright.data.corpora import Files
from meshwright.data.encoders import ChatEncoder, Encoding, encoder_of
from meshwright.data.sampler import best_fit
from meshwright.data.tokenizers import load_tokenizer
from meshwright.errors import ConfigError, DataError
from meshwright.spec.loading import load_config
from meshwright.spec.training import DataSpec, TrainSpec

CHAT = Path(__file__).parents[2] / "examples" / "chat"
ROWS = [json.loads(line) for line in (CHAT / "conversations.jsonl").read_text().splitlines()]
ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(CHAT / "tokenizer"))


def encoder(tokenizer, source):
    return ChatEncoder(
        tokenizer, ChatTemplate(source, {"eos_token": "<|endoftext|>"}, "a template")
    )


def trained(encoder, *messages, first=0):
    numbers = tuple(n for n, m in enumerate(messages) if n >= first and m["role"] == "assistant")
    ids, mask = encoder.one(Conversation("row 1", messages, numbers))
    return encoder.tokenizer.decode(ids[mask])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"prompt": "hi", "completion": "yo"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": "hi", "response": "yo"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"instruction": "hi", "input": "", "output": "yo"},
        {"question": "hi", "answer": "yo", "messages": None},
    ],
)
def test_forms_of_rows(row):
    assert conversation_of(row, "").messages == (ASKED, SAID)


def test_alpaca_with_an_input_and_a_system():
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be short"}
    roles = [(one["role"], one["content"]) for one in conversation_of(row, "").messages]
    assert roles == [("system", "be short"), ("user", "add\n\n1 2"), ("assistant", "3")]


def test_what_a_row_does_not_train_may_be_marked_so():
    asked = [{**ASKED, "weight": 0}, {**SAID, "weight": 0}, ASKED]
    for row in (
        {"messages": [{**ASKED, "weight": 0}, {**SAID, "weight": 1}]},
        {"prompt": asked, "completion": [SAID]},
    ):
        assert conversation_of(row, "").messages[-1]["content"] == SAID["content"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "a"}, "no conversation: a row has messages, conversations, conv"),
        ({"messages": [ASKED]}, "no turn of the assistant"),
        ({"prompt": [ASKED, SAID], "completion": [ASKED]}, "no turn of the assistant"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": [{"content": "a"}]}, "message 1 of 'messages' has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1: its content is a int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image'"),
        ({"conversations": [{"from": "gtp", "value": "a"}]}, "nearest legal: gpt"),
        ({"instruction": 1, "output": "a"}, "field 'instruction' is a int"),
        ({"messages": [ASKED, {**SAID, "weight": 0}]}, "no turn of the assistant that is trained"),
        ({"messages": [ASKED, {**SAID, "weight": 0.5}]}, "a turn is trained or not; nearest leg"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "neither content nor tool_calls"),
    ],
)
def test_rows_that_are_no_conversation(row, why):
    with pytest.raises(ValueError, match=why):
        conversation_of(row, "")


def test_ids_and_masks_are_those_of_transformers(tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(CHAT / "tokenizer"))
    for chat in (encoder_of(tokenizer, "chat"), encoder(tokenizer, CHATML)):
        for row in ROWS[:40]:
            ids, mask = chat.one(conversation_of(row, ""))
            found = theirs.apply_chat_template(
                row["messages"], return_assistant_tokens_mask=True, return_dict=True
            )
            assert ids.tolist() == found["input_ids"]
            assert mask.astype(int).tolist() == found["assistant_masks"]
        prompt = theirs.apply_chat_template([ASKED], add_generation_prompt=True)["input_ids"]
        assert chat.prompt([ASKED]) == prompt
        assert chat.turn_ends() == [258]


def test_only_the_completion_of_a_prompt_with_answers_is_trained(tokenizer):
    row = {"prompt": [ASKED, SAID, ASKED], "completion": [SAID | {"content": "last"}]}
    found = conversation_of(row, "")
    chat = encoder(tokenizer, CHATML)
    assert trained(chat, *found.messages, first=3) == "last<|im_end|>"
    marked = encoder_of(tokenizer, "chat")
    ids, mask = marked.one(found)
    assert tokenizer.decode(ids[mask]) == "last<|im_end|>"


def test_a_template_without_prompts_for_answers(tokenizer):
    inst = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert trained(encoder(tokenizer, inst), ASKED, SAID, ASKED, SAID) == (
        " yo<|endoftext|> yo<|endoftext|>"
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (CHATML.replace("{% if add", "{% if false and add"), "has no prompt for an answer"),
        (CHATML.replace("m.content +", "(m.content if loop.last else '') +"),
         "does not write the content of turn 2"),
        (CHATML.replace("assistant\n", "assistent\n"), "turn 2 differently with the prompt"),
        (CHATML.replace("{% for", "{% set ms %}{% for") + "{% endset %}{{ ms | trim }}",
         "one message after the other"),
        ("{% generation %}{% endgeneration %}x", "marks no token of it"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        pytest.param(
         "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
         "10000000 turns of its loops", marks=pytest.mark.slow),
        ("{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}", "more than 67108864 characters"),
        ("{{ 'x' * 10000000000 }}", "more than 67108864 characters"),
        ("{{ 'x'|center(10000000000) }}", "more than 67108864 characters"),
        ("{{ '{:>9999999999}'.format(1) }}", "the width in the format"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)  # fmt: skip
def test_templates_that_are_refused(tokenizer, source, why):
    with pytest.raises(ValueError, match=why):
        trained(encoder(tokenizer, source), ASKED, SAID, ASKED, SAID)


def test_a_message_that_quotes_a_special_token(tokenizer):
    with pytest.raises(ValueError, match=r"message 1 quotes the special token '<\|im_end\|>'"):
        trained(encoder_of(tokenizer, "chat"), ASKED | {"content": "a<|im_end|>"}, SAID)


def test_a_token_of_template_and_answer(tmp_path):
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.BPE({"a": 0, ":": 1, ":a": 2, "</s>": 3}, [(":", "a")]))
    backend.save(str(tmp_path / "tokenizer.json"))
    chat = encoder(
        load_tokenizer(str(tmp_path)),
        "{% for m in messages %}{{ '' if m.role == 'user' else ':' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}",
    )
    with pytest.raises(ValueError, match="':a' is in part the assistant's and in part the templ"):
        trained(chat, {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})


def test_where_templates_come_from(tmp_path, tokenizer):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer.to_json())
    file = folder / "tokenizer.json"
    with pytest.raises(DataError, match=r"no chat template beside .*data\.chat_template"):
        load_template(file)
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    config = {"chat_template": several, "bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_template(file)
    assert (found.source, found.tokens) == ("yes", {"bos_token": "<s>"})
    (folder / "chat_template.jinja").write_text("file")
    assert load_template(file).source == "file"
    (tmp_path / "own.jinja").write_text("own")
    assert load_template(file, str(tmp_path / "own.jinja")).source == "own"
    (tmp_path / "own.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="not a Jinja template"):
        load_template(file, str(tmp_path / "own.jinja"))
    with pytest.raises(DataError, match=r"needs a tokenizer\.json with a chat template"):
        Encoding("bytes", None, "chat").load()


def spec_of(source, **more):
    given = {"format": "chat", "packing": "documents", "tokenizer": str(CHAT / "tokenizer")}
    return DataSpec(source=str(source), **given, **more)


def test_store_keeps_masks_and_its_template(tmp_path, tokenizer):
    source = Files((CHAT / "conversations.jsonl",), format="chat")
    store = prepare(
        [source], str(CHAT / "tokenizer"), tmp_path / "s", form="chat", shard_bytes=1 << 20
    )
    (shard,) = store.shards
    chat = store.encoder()
    assert chat.digest == encoder_of(tokenizer, "chat").digest
    for start, end, row in zip([0, *shard.ends], shard.ends, ROWS, strict=False):
        ids, mask = chat.one(conversation_of(row, ""))
        assert np.array_equal(shard.read(start, end), ids)
        assert np.array_equal(shard.read_mask(start, end), mask)
    assert store.manifest.shards[0].supervised == int(shard.mask.tokens.sum())
    again = prepare([source], str(CHAT / "tokenizer"), tmp_path / "s", form="chat")
    assert again.digest == store.digest

    content = bytearray((tmp_path / "s" / "mask-00000.bin").read_bytes())
    content[7] ^= 1
    (tmp_path / "s" / "mask-00000.bin").write_bytes(content)
    assert any("mask-00000.bin is damaged" in one for one in verify(tmp_path / "s").problems)
    with pytest.raises(DataError, match=r"mask-00000\.bin is damaged within bytes 0-"):
        open_store(tmp_path / "s").shards[0].read_mask(0, 20)
    with pytest.raises(DataError, match=r"holds conversations; nearest legal: data.format = 'chat"):
        open_data(DataSpec(source=str(tmp_path / "s")), tmp_path)


def test_rows_that_cannot_be_trained_on_are_refused_by_number_or_skipped(tmp_path):
    bad = [{"messages": [ASKED]}, {"messages": [ASKED, SAID | {"content": "<|im_end|>"}]}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[0], bad[0], ROWS[1], bad[1])))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: it has no turn of the assistant"):
        open_data(spec_of(file), tmp_path / "cache")
    said = []
    data = open_data(spec_of(file, on_error="skip"), tmp_path / "cache", progress=said.append)
    assert data.documents("train") + data.documents("validation") == 2
    assert any("skipped 2" in line for line in said)  # there may be one of progress before
    listed = (data.folders[0] / "skipped.txt").read_text().splitlines()
    assert [line.split(": ")[0].rsplit(" ", 1)[1] for line in listed] == ["2", "4"]


def test_rows_are_whole_conversations_with_their_masks(tmp_path, tokenizer):
    data = open_data(spec_of(CHAT / "conversations.jsonl", validation=0.1), tmp_path)
    assert data.check(TrainSpec(seq_len=512, batch=4)) == []
    sampler = data.sampler("train", 512, 4)
    assert sampler.facts()["cut"] == 0
    assert sampler.facts()["fill"] > 0.95
    chat, seen = encoder_of(tokenizer, "chat"), 0
    found = [chat.one(conversation_of(row, "")) for row in ROWS]
    masks = {tuple(ids.tolist()): mask for ids, mask in found}
    for step in range(4):
        rows = sampler.rows(step)
        for inputs, targets, of in zip(rows.inputs, rows.targets, rows.segments, strict=True):
            for number in range(of.max() + 1):
                here = np.flatnonzero(of == number)
                ids = inputs[here].tolist()
                if tuple(ids) not in masks:  # its last token is but a target; or it is filling
                    assert here[-1] == 511
                    continue
                seen += 1
                expected = np.where(masks[tuple(ids)][1:], ids[1:], IGNORE).tolist()
                assert targets[here].tolist() == [*expected, IGNORE]
    assert seen > 40


def test_truncation_is_told_and_what_it_leaves_nothing_of_is_refused(tmp_path):
    long = {"messages": [ASKED | {"content": "x" * 300}, SAID]}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (*ROWS[:20], long)))
    open_it = spec_of(file, validation=0.0)
    with pytest.raises(DataError, match=r"conversation 21 of the train split has no token that is"):
        open_data(open_it, tmp_path).check(TrainSpec(seq_len=128, batch=2))
    data = open_data(open_it.model_copy(update={"on_error": "skip"}), tmp_path)
    (line,) = data.check(TrainSpec(seq_len=128, batch=2))
    facts = data.sampler("train", 128, 2).facts()
    assert facts["left_out"] == 1
    assert facts["conversations"] == 20
    assert f"{facts['cut']} of 20 conversations are cut to train.seq_len = 128 and 1 left" in line


def test_best_fit_fills_rows():
    lengths = np.array([5, 3, 7, 2, 2, 10, 1])
    rows = best_fit(lengths, np.arange(7), 10)
    assert sorted(one for row in rows for one in row) == list(range(7))
    assert [sum(lengths[row]) for row in rows] == [10, 10, 10]


def test_the_config_keeps_conversations_apart():
    config = load_config(None, ["data.format=chat"])
    assert config.data.packing == "documents"
    assert config.origins["data.packing"] == "derived from data.format"
    with pytest.raises(ConfigError, match=r"nearest legal: data\.packing = 'documents'"):
        load_config(None, ["data.format=chat", "data.packing=stream"])
    with pytest.raises(ConfigError, match=r"nearest legal: data\.format = 'chat'"):
        load_config(None, ["data.chat_template=a.jinja"])


@pytest.mark.slow
def test_a_stream_tells_which_fields_are_not_used_as_a_store_does(tmp_path, tokenizer):
    pytest.importorskip("datasets")
    lines = (CHAT / "conversations.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "score": number} for number, line in enumerate(lines)]
    file = tmp_path / "scored.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = []
    open_data(spec_of(str(file)), tmp_path / "store", progress=said.append)
    (stored,) = [line for line in said if "'score'" in line]
    streamed = open_data(spec_of(f"hf:{file}", streaming=True, shuffle_buffer=10), tmp_path)
    (told,) = [line for line in streamed.check(TrainSpec(seq_len=256)) if "'score'" in line]
    what = "note: the field 'score' is not used ("
    assert what in stored
    assert told == f"{what}10 of the first 10 conversations of the stream)"


def test_streams_read_the_same_conversations(tmp_path, tokenizer):
    pytest.importorskip("datasets")
    source = f"hf:{CHAT / 'conversations.jsonl'}"
    spec = spec_of(source, streaming=True, validation=0.1, shuffle_buffer=10)
    data = open_data(spec, tmp_path)
    assert data.check(TrainSpec(seq_len=256, batch=3, eval_every=1)) == []
    assert data.truncation(256) == {"read": 10, "cut": 0, "tokens_cut": 0}
    (told,) = data.check(TrainSpec(seq_len=64, batch=3))
    cut = data.truncation(64)
    assert told.startswith(f"train: {cut['cut']} of the first 10 conversations of the stream are")
    assert told.endswith(f"{cut['tokens_cut']:,} tokens are cut off")
    whole, parts = data.sampler("train", 256, 3), data.sampler("train", 256, 3)
    first = [whole.rows(step) for step in range(6)]
    for step in range(3):
        mine = parts.rows(step, range(1, 3))
        assert np.array_equal(mine.targets, first[step].targets[1:])
    assert all((rows.targets != IGNORE).any(1).all() for rows in first)
    position = data.sampler("train", 256, 3)
    for step in range(4):
        position.rows(step)
    later = data.sampler("train", 256, 3)
    later.seek(position.position().to_json())
    assert np.array_equal(later.rows(4).inputs, first[4].inputs)
    held = data.held_out(256, 3, 1).rows(0)
    assert (held.targets != IGNORE).any()
    text = tokenizer.decode(first[0].targets[0][first[0].targets[0] != IGNORE])
    assert text.startswith("It is ")
    assert text.count("It is ") == text.count("<|im_end|>")


def test_blends_of_conversations(tmp_path):
    source = str(CHAT / "conversations.jsonl")
    spec = spec_of(source).model_copy(update={"source": (source, source), "weights": (1.0, 3.0)})
    rows = open_data(spec, tmp_path).sampler("train", 128, 8).rows(0)
    assert rows.inputs.shape == (8, 128)
    assert Blend((1.0, 3.0)).counts(8) == [2, 6]
