"""Input that is meant to harm: sizes without end, texts that never end, escapes of a terminal."""

import datetime
import itertools
import json
import sys
import time
import unicodedata
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_folders import hf_folder, model_of
from meshwright.checkpoint.inspect import inspect
from meshwright.checkpoint.weights import write_weights
from meshwright.cli import generate as command
from meshwright.cli import main
from meshwright.cost.calibration import read_calibration
from meshwright.data import load_tokenizer, open_data
from meshwright.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MeshwrightError,
    nearest_divisors,
)
from meshwright.evaluate import talk
from meshwright.files import read_bytes, read_text
from meshwright.interop.importing import import_files
from meshwright.layout import Machine, resolve_layout
from meshwright.parsing import parse_json, parse_toml, printable
from meshwright.spec.loading import load_config
from meshwright.spec.stored import find_step
from meshwright.training.run_folder import choose_folder

DEEP = "[" * 5000 + "]" * 5000
LONG = "9" * 5000
ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 9)}]\n"
    for before, after in itertools.pairwise("abcdefg")
)


@pytest.mark.case(48)
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.n_layers=1000000000", "model.n_layers = 1000000000 .* less than or equal to 2048"),
        ("train.batch=10000000000", "less than or equal to 2147483647"),
        ("layout.pp=1000000000", "less than or equal to 1048576"),
        ("cluster.nodes=1000000000", "less than or equal to 1048576"),
        (f"train.seq_len={LONG}", r"has 5000 bytes; at most 3500"),
        (f"data.source={DEEP}", r"has 10000 bytes; at most 3500"),
        (f"data.source={'a' * 300}", r"has 300 bytes; at most 3500, and 255 between"),
        ('data.source="a\\u0000b"', "has control characters"),
        ('log.name="\\u001b[2J"', "has control characters"),
    ],
)
def test_a_config_has_bounds(override, says, outcome):
    with outcome.refused(ConfigError, says):
        load_config(None, [override])


# Too long as a name in bytes, not in characters; as a path; and with the name of a file below it.
LONG_PATHS = ["é" * 200, "a/" * 2500, "/".join(["é" * 120] * 15), "/".join(["a" * 200] * 20)]
PATH_KEYS = [
    *("data.source", "data.tokenizer", "data.cache", "model.init_from", "cluster.calibration"),
    *("log.dir", "log.name", "checkpoint.dir"),
]


@pytest.mark.case(50)
@pytest.mark.parametrize("key", PATH_KEYS)
def test_no_path_of_a_config_is_too_long(key, outcome):
    for path in LONG_PATHS:
        with outcome.refused(ConfigError, rf"{key} = .{{40}}\.\.\. has \d+ bytes; at most 3500"):
            load_config(None, [f"{key}={path}"])


def test_a_source_with_the_longest_of_names_is_read(config, tmp_path):
    """It cannot be a part of a pair, whose other part would have a longer one."""
    rows = {}
    for name in ("a" * 251 + ".txt", "short.txt"):
        file = tmp_path / name
        file.write_text("a story " * 100)
        asked = config(f"data.source={file}")
        dataset = open_data(asked.data, tmp_path / "cache", vocab_size=asked.model.vocab_size)
        rows[name] = dataset.sampler("train", 16, 4).rows(0).inputs.tolist()
    long, short = rows.values()
    assert long == short
    assert bytes(token for token in long[0] if token < 256) in b"a story " * 100


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127])
def test_the_next_name_of_a_run_is_no_longer_than_one_may_be(name, config, tmp_path):
    held = tmp_path / "runs" / name / "plan.json"
    held.parent.mkdir(parents=True)
    held.touch()
    with pytest.raises(ConfigError, match=r"already holds a run; nearest legal: log.name = ") as e:
        choose_folder(config(f"log.name={name}"), datetime.datetime.now())
    new = str(e.value).partition(" log.name = ")[2].partition(". To continue")[0]
    assert choose_folder(config(f"log.name={new}"), datetime.datetime.now()).path.name == new


@pytest.mark.case(50)
@pytest.mark.parametrize("path", ["a" * 300, *LONG_PATHS[:2]])
@pytest.mark.parametrize(
    "words",
    [
        *(
            "checkpoint verify @",
            "checkpoint prune @ --keep 1",
            "checkpoint export-hf @ out",
            "checkpoint import-hf @ out",
        ),
        *("generate @ --prompt a", "generate run --prompt a --tokenizer @", "eval @", "report @"),
        *("train @", "train --resume @", "train --plan @", "plan @", "plan --after-oom @"),
        *("doctor @", "config show @", "config import @", "launch slurm @", "data verify @"),
        *("data inspect @", "clean @", "prove @", "simulate @", "predict --rows @ --out out"),
    ],
)
def test_no_path_of_a_command_is_too_long(words, path, tmp_path, monkeypatch, capsys, outcome):
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    code = main([path if word == "@" else word for word in words.split()])
    said = capsys.readouterr().err.strip()
    outcome.add(code, said, time.monotonic() - started)
    assert code == 2
    assert said.startswith(f"meshwright {words.split()[0]}: ")
    assert len(said) < 6000


def test_an_argument_has_no_nul(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["report", "a\0b"])
    assert "an argument has a NUL character" in capsys.readouterr().err


def test_a_step_has_a_bounded_number_of_microbatches():
    machine = Machine("cpu", 2, 2, "CPU", is_fixed=False)
    config = load_config(None, ["train.batch=1000000000", "layout.microbatch=1"])
    says = (
        r"is 500000000 microbatches; a step has at most 65536; nearest legal: train.batch = 131072"
    )
    with pytest.raises(ConfigError, match=says):
        resolve_layout(config, machine)


@pytest.mark.parametrize("parse", [parse_json, lambda text: parse_toml(f"a = {text}")])
@pytest.mark.parametrize("text", [DEEP, "[" * 70 + "]" * 70, LONG, "-" + "9" * 301])
def test_what_overflows_a_stack_or_a_float_is_no_text(parse, text):
    with pytest.raises(ValueError, match=r"nested more than 64|integer|digits"):
        parse(text)


def test_what_people_write_is_read():
    assert parse_json("[" * 60 + "1" + "]" * 60)
    assert parse_json(b'{"a": [1, -2, 1e999, "\\u001b"]}')["a"][:2] == [1, -2]
    assert parse_toml("a = 9223372036854775808")["a"] == 2**63


@pytest.mark.case(48)
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yml", DEEP, "not valid YAML"),
        ("a.yml", f"a: {LONG}", "not valid YAML"),
        (
            "a.yml",
            ALIASES,
            "more than 100000 values",
        ),
        ("a.json", f'{{"a": {DEEP}}}', "nested more than 64"),
        ("a.sh", "A='--num-layers 4 '\n" + "A=$A$A\n" * 40 + "torchrun x.py $A\n", "1000000 char"),
    ],
)
def test_configs_of_others_have_bounds(name, text, says, tmp_path, outcome):
    """Aliases of aliases, and variables of variables, would stand for billions of values."""
    (tmp_path / name).write_text(text)
    system = "megatron" if name.endswith(".sh") else None
    with outcome.refused(ConfigError, says):
        import_files([tmp_path / name], system=system)


@pytest.mark.case(48)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("memory = 0", "cpu.memory = 0.0 must be finite and above 0"),
        ("fixed = -1", "cpu.fixed = -1.0 must be finite and not negative"),
        ("inner.rate = inf", "must be finite and above 0"),
        (f"fixed = {'9' * 400}", "has an integer of"),
    ],
)
def test_a_calibration_is_of_something(line, says, tmp_path, outcome):
    file = tmp_path / "c.toml"
    file.write_text(f"[cpu]\n{line}\n")
    with outcome.refused(ConfigError, says):
        read_calibration(file)


def with_pattern(folder, pattern):
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split]}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.case(48)
@pytest.mark.parametrize("pattern", ["(?:a|aa)+$", "(a+)+$", r"((\w*\s?)*){2,}!", "(([a-z])+.)+x"])
def test_a_pattern_that_takes_forever_is_refused(pattern, tmp_path, outcome):
    folder = hf_folder(tmp_path)
    with_pattern(folder, pattern)
    with outcome.refused(DataError, "can be matched in more than one way"):
        load_tokenizer(str(folder))


# Of GPT-2, Llama 3, DeepSeek-V3, OLMo 2 and o200k.
PATTERNS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?=(\d{3})+(?!\d))",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
    r"(a+)*+b",  # what it has matched it keeps
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_known_tokenizers_are_taken(pattern, tmp_path):
    folder = hf_folder(tmp_path)
    with_pattern(folder, pattern)
    assert load_tokenizer(str(folder)).vocab_size > 256


@pytest.mark.case(48)
def test_weights_that_are_no_numbers_are_told(tmp_path, capsys, outcome):
    folder = hf_folder(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, file)
    assert main(["generate", str(folder), "--prompt", "a", "--max-tokens", "2"]) == 2
    said = capsys.readouterr().err
    assert "not finite: its weights are damaged" in said
    outcome.add(2, said, 0.0)


def test_a_model_larger_than_its_weights_takes_no_memory(tmp_path):
    """Its files say 2**62 bytes; their hashes are those that the manifest has."""
    model = model_of()
    huge = model.spec.model_copy(update={"vocab_size": 2**31 - 1, "dim": 2**29})
    write_weights(tmp_path / "checkpoints", huge, dict(model.named_parameters()), {})
    assert main(["generate", str(tmp_path), "--prompt", "a", "--tokenizer", "bytes"]) == 2


def test_divisors_of_a_large_number_are_found_at_once():
    assert nearest_divisors(2**31 - 1, 7) == [1, 2**31 - 1]
    assert nearest_divisors(12, 5) == [4, 6]
    assert nearest_divisors(36, 6, 3) == [3, 4, 6]


ESCAPES = "a\x1b[2J\x07\u202eb\tc\nd"


@pytest.mark.case(48)
@pytest.mark.parametrize(
    ("is_terminal", "shown"), [(True, r"a\x1b[2J\x07\u202eb"), (False, "a\x1b[2J")]
)
def test_a_terminal_gets_no_escapes(is_terminal, shown, monkeypatch, capsys, outcome):
    ids = list(ESCAPES.encode())
    made = [torch.tensor([one]) for one in ids[1:]]
    narrow = SimpleNamespace(spec=SimpleNamespace(dim=32))
    monkeypatch.setattr(talk, "load_model", lambda folder: narrow)
    monkeypatch.setattr(talk, "generate_tokens", lambda *a, **k: iter(made))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    words = SimpleNamespace(
        chat=False,
        system=None,
        folder=".",
        prompt="a",
        max_tokens=9,
        temperature=0,
        top_p=1,
        seed=0,
        tokenizer="bytes",
    )
    words.json = False
    assert command.run(words) == 0
    assert capsys.readouterr().out.startswith(shown)
    words.json = True
    assert command.run(words) == 0
    assert json.loads(capsys.readouterr().out)["text"] == ESCAPES
    outcome.add(0, shown, 0.0)


def test_an_error_shows_no_escapes_and_no_end_of_text(capsys):
    assert printable("\x1b[31m\x9b\r") == r"\x1b[31m\x9b\r"
    kinds = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    embed = (chr(one) for one in range(1 << 16) if unicodedata.bidirectional(chr(one)) in kinds)
    for mark in ("\u061c", "\u200e", "\u200f", *embed):  # UAX #9, table 4
        assert printable(mark) == f"\\u{ord(mark):04x}"
    main(["train", "model.\x1b[2Jdim=3"])
    assert "\x1b" not in capsys.readouterr().err
    assert len(str(MeshwrightError("x" * 10**6))) < 200


@pytest.mark.case(48)
def test_steps_outside_the_run_folder_are_found(tmp_path, capsys, outcome):
    model = model_of()
    run, apart = tmp_path / "run", tmp_path / "apart"
    run.mkdir()
    config = load_config(None, [f"checkpoint.dir={apart}"])
    (run / "config.toml").write_text(f'[checkpoint]\ndir = "{config.checkpoint.dir}"\n')
    with pytest.raises(CheckpointError, match=f"which saves its steps in {apart}, holds no"):
        inspect(run)
    step = write_weights(apart, model.spec, dict(model.named_parameters()), {})
    assert find_step(run) == step
    assert main(["checkpoint", "verify", str(run)]) == 0
    words = ["generate", str(run), "--prompt", "a", "--max-tokens", "1", "--tokenizer", "bytes"]
    assert main(words) == 0
    outcome.add(0, capsys.readouterr().out.strip(), 0.0)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "/dev/zero"],
        ["plan", "--calibration", "/dev/zero"],
        ["plan", "cluster.calibration=/dev/zero"],
        ["train", "--plan", "/dev/zero"],
        ["predict", "--rows", "/dev/zero", "--out", "rows.jsonl"],
        ["config", "import", "/dev/zero"],
        ["plan", "data.source=stdlib", "data.tokenizer=/dev/zero"],
    ],
    ids=" ".join,
)
def test_a_file_without_end_fills_no_memory(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "/dev/zero" in capsys.readouterr().err


def test_a_document_has_a_largest_size(tmp_path):
    path = tmp_path / "long.json"
    path.write_bytes(b"[1,\r\n2]")
    assert (read_bytes(path, 7), read_text(path, 7)) == (b"[1,\r\n2]", "[1,\n2]")
    with pytest.raises(OSError, match="it has more than 6 B"):
        read_bytes(path, 6)
