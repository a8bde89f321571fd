"""Which tokens begin and end a text: in training, evaluation, generation, and after an export."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from hf_folders import export
from meshwright.cli import main
from meshwright.data import open_store, prepare
from meshwright.data.boundaries import ends_of
from meshwright.data.corpora import Files
from meshwright.data.megatron_pair import write_megatron
from meshwright.data.tokenizers import load_tokenizer
from meshwright.errors import DataError
from meshwright.spec.stored import StoredTokenizer, stored_tokenizer
from test_chat import CHAT, CHATML

BEGIN = "<begin>"


def write_tokenizer(folder, processor=None, **config):
    """Write the tokenizer of the example with a token that begins texts."""
    folder.mkdir(exist_ok=True)
    backend = Tokenizer.from_file(str(CHAT / "tokenizer" / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(BEGIN, special=True)])
    begin, end = backend.token_to_id(BEGIN), backend.token_to_id("<|endoftext|>")
    if processor is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=processor, special_tokens=[(BEGIN, begin), ("<|endoftext|>", end)]
        )
    backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    content = {**named, "bos_token": BEGIN, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHATML)
    return begin, end


FILES = {
    "no rule": (None, {}, 0),
    "the file's rule": (f"{BEGIN} $A", {}, 1),
    "an end, too": (f"{BEGIN} $A <|endoftext|>", {}, 1),
    "an end alone": ("$A <|endoftext|>", {}, 0),
    "twice": (f"{BEGIN} {BEGIN} $A", {}, 2),
    "a config that transformers ignores": (None, {"add_bos_token": True}, 0),
    "a config that would take it away": (f"{BEGIN} $A", {"add_bos_token": False}, 1),
    "a token that no file names": (f"{BEGIN} $A", {"bos_token": None}, 1),
}


@pytest.mark.parametrize("kind", FILES)
def test_texts_begin_as_in_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    processor, config, count = FILES[kind]
    begin, end = write_tokenizer(tmp_path, processor, **config)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.bos_ids == (begin,) * count
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("hi")["input_ids"]
    assert theirs[: count + 2] == [*tokenizer.bos_ids, *tokenizer.encode("hi")]
    ids, lengths = tokenizer.pack(["hi", ""])
    first = [begin] * count
    assert ids.tolist() == [*first, *tokenizer.encode("hi"), end, *first, end]
    assert lengths.tolist() == [count + 3, count + 1]


def test_a_key_decides_whether_texts_begin_with_bos(tmp_path):
    begin, _ = write_tokenizer(tmp_path, f"{BEGIN} $A")
    own, without = load_tokenizer(str(tmp_path)), load_tokenizer(str(tmp_path), bos=False)
    assert (own.bos_ids, without.bos_ids) == ((begin,), ())
    assert own.digest != without.digest
    write_tokenizer(tmp_path)
    assert load_tokenizer(str(tmp_path), bos=True).bos_ids == (begin,)
    write_tokenizer(tmp_path, bos_token=None)
    for name in (str(tmp_path), "bytes"):
        with pytest.raises(DataError, match="bos = false"):
            load_tokenizer(name, bos=True)


def test_a_store_begins_its_documents_and_keeps_how(tmp_path):
    begin, end = write_tokenizer(tmp_path / "t")
    (tmp_path / "a.txt").write_text("ab")
    for name, bos in (("own", True), ("none", False)):
        source = Files((tmp_path / "a.txt",))
        store = prepare([source], str(tmp_path / "t"), tmp_path / name, bos=bos)
        first = [begin] if bos else []
        assert store.shards[0].tokens.tolist() == [*first, *store.tokenizer().encode("ab"), end]
        # The store has no tokenizer_config.json, which names the token.
        assert open_store(tmp_path / name).tokenizer().bos_ids == tuple(first)
    with pytest.raises(DataError, match="another tokenizer"):
        prepare([source], str(tmp_path / "t"), tmp_path / "own", bos=False)


def test_a_megatron_pair_begins_its_documents_as_it_was_written(tmp_path):
    from meshwright.data import open_data
    from meshwright.spec.training import DataSpec

    begin, _ = write_tokenizer(tmp_path / "t", f"{BEGIN} $A")
    (tmp_path / "a.txt").write_text("some text " * 20)
    for bos, wanted in ((None, (begin,)), (False, ())):
        folder = tmp_path / f"store{bos}"
        store = prepare([Files((tmp_path / "a.txt",))], str(tmp_path / "t"), folder, bos=bos)
        write_megatron(tmp_path / f"pair{bos}", store.shards, store.manifest.vocab_size)
        spec = DataSpec(source=str(tmp_path / f"pair{bos}"), tokenizer=str(tmp_path / "t"))
        assert open_data(spec, tmp_path).tokenizer.bos_ids == wanted


def test_a_run_tells_how_its_texts_begin_and_what_it_was_trained_on(tmp_path):
    begin, _ = write_tokenizer(tmp_path, f"{BEGIN} $A")
    assert stored_tokenizer(tmp_path) == StoredTokenizer(str(tmp_path / "tokenizer.json"))
    plan = {"tokenizer": {"name": "t", "eos": "<|endoftext|>", "file": "x", "bos": [begin]}}
    plan["config"] = {"data": {"format": "chat"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = stored_tokenizer(tmp_path)
    assert (found.eos, found.bos, found.form) == ("<|endoftext|>", (begin,), "chat")
    del plan["tokenizer"]["bos"], plan["config"]  # as earlier versions wrote it
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = stored_tokenizer(tmp_path)
    assert (found.bos, found.form) == ((), "text")


@pytest.mark.parametrize(
    ("generation", "config", "form", "wanted"),
    [
        (None, None, "text", ["end"]),
        ([7, "end"], 9, "text", [7, "end"]),
        (7, None, "text", ["end", 7]),
        (None, ["end", 9], "text", ["end", 9]),
        (None, None, "chat", ["turn", "end"]),
        (["end", 7], None, "chat", ["turn", "end", 7]),
    ],
)
def test_ends_are_the_tokenizers_those_of_files_and_of_turns(
    tmp_path, generation, config, form, wanted
):
    _, end = write_tokenizer(tmp_path)
    known = {"end": end, "turn": 258}

    def ids(value):
        listed = [known.get(one, one) for one in (value if isinstance(value, list) else [value])]
        return listed if isinstance(value, list) else listed[0]

    for name, ends in (("generation_config.json", generation), ("config.json", config)):
        if ends is not None:
            (tmp_path / name).write_text(json.dumps({"eos_token_id": ids(ends)}))
    assert ends_of(load_tokenizer(str(tmp_path)), form) == ids(wanted)


def write_model(folder, model, **more):
    """Write a model of transformers with the tokenizer, and as the run of it `folder`-run."""
    model.save_pretrained(folder)
    begin, end = write_tokenizer(folder, f"{BEGIN} $A")
    content = {"eos_token_id": more.pop("ends", end)}
    (folder / "generation_config.json").write_text(json.dumps(content))
    run = folder.with_name("run")
    assert main(["checkpoint", "import-hf", str(folder), str(run)]) == 0
    record = {"name": "t", "eos": "<|endoftext|>", "file": "x", "bos": [begin]} | more
    plan = {"tokenizer": record, "config": {"data": {"format": more.get("form", "text")}}}
    (run / "plan.json").write_text(json.dumps(plan))
    return run


def small_llama():
    transformers = pytest.importorskip("transformers")
    from hf_models import SIZES

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "vocab_size": 264}))


def read(path):
    return json.loads(path.read_text())


def test_an_export_after_conversations_ends_where_turns_end(tmp_path):
    transformers = pytest.importorskip("transformers")
    run = write_model(tmp_path / "hf", small_llama(), form="chat")
    assert export(run, tmp_path / "out") == 0
    assert read(tmp_path / "out" / "config.json")["eos_token_id"] == [258, 256]
    assert read(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [258, 256]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == "<|im_end|>"
    ours = load_tokenizer(str(tmp_path / "hf"))
    assert theirs("a")["input_ids"] == [*ours.bos_ids, *ours.encode("a")]


@pytest.mark.parametrize("begins", [True, False])
def test_an_export_begins_texts_as_its_run_did(tmp_path, begins):
    transformers = pytest.importorskip("transformers")
    run = write_model(tmp_path / "hf", small_llama(), **({} if begins else {"bos": []}))
    assert export(run, tmp_path / "out") == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found = theirs("hi")["input_ids"]
    ours = load_tokenizer(str(tmp_path / "out"))
    assert ours.bos_ids == ((theirs.bos_token_id,) if begins else ())
    assert found == [*ours.bos_ids, *ours.encode("hi")]


FAMILIES = (
    *("arcee", "bamba", "deepseek_v3", "dots1", "ernie4_5", "exaone4"),
    *("gemma", "gemma2", "gemma3", "glm4", "glm4_moe", "gpt_oss", "granite"),
    "granitemoehybrid",
    *("llama", "minimax_m2", "mistral", "mixtral", "neox", "olmo2", "olmo3", "olmoe", "phi3"),
    *(
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "starcoder2",
    ),
)


RECURRENT = {"qwen3_5", "qwen3_5_moe", "qwen3_next", "granitemoehybrid", "bamba"}


def test_all_families_are_generated_with():
    pytest.importorskip("transformers")
    from hf_models import KINDS

    assert sorted(KINDS) == list(FAMILIES)


@pytest.mark.often(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_stops_in_transformers_where_it_stops_here(family, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    import torch

    from hf_models import KINDS, SIZES

    kind, config, kinds = KINDS[family]
    sizes = {**SIZES, "hidden_size": 64} if family == "neox" else SIZES
    torch.manual_seed(0)
    # A recurrence of large weights amplifies the rounding in which both differ.
    more = {"vocab_size": 264, "initializer_range": 0.1 if family in RECURRENT else 0.5}
    model = kind(config(**{**sizes, **next(iter(kinds.values())), **more})).eval()
    write_tokenizer(tmp_path / "t", f"{BEGIN} $A")
    ours = load_tokenizer(str(tmp_path / "t"))
    prompt = torch.tensor([[*ours.bos_ids, *ours.encode("To be or")]])
    free = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    free = free[0, prompt.shape[1] :].tolist()
    news = [token for at, token in enumerate(free) if at > 1 and token not in free[:at]]
    stop = news[0] if news else free[0]
    run = write_model(tmp_path / "hf", model, ends=[256, stop])
    assert export(run, tmp_path / "out") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("To be or")["input_ids"]
    assert ids == prompt[0].tolist()
    wanted = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0]
    assert int(wanted[-1]) in (256, stop)
    words = ["--prompt", "To be or", "--temperature", "0", "--max-tokens", "24", "--json"]
    for folder in (run, tmp_path / "out"):
        capsys.readouterr()
        assert main(["generate", str(folder), *words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["tokens"] == len(wanted) - len(ids)
