"""What `benchmarks.fuzz` damages: a valid example of every file that is read, and its reader."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.fuzz import Reader
from benchmarks.fuzz_folders import TINY, files_of, make_folders
from meshwright.cli import main as cli
from meshwright.cli.prove import case_of_json
from meshwright.cost.calibration import read_calibration
from meshwright.data import load_tokenizer, train_bpe
from meshwright.data.corpora import Files
from meshwright.data.megatron_pair import open_megatron, write_megatron
from meshwright.data.store import open_store, verify
from meshwright.data.writer import prepare
from meshwright.files import hash_file
from meshwright.interop.importing import import_files
from meshwright.layout import Layout, Machine, resolve_layout
from meshwright.planner.saved import load_planned
from meshwright.prove.case import Case
from meshwright.spec.dump import to_toml
from meshwright.spec.loading import build_config, load_config

TEXT: Final = "story {n}: the cat sat on mat {n}, {{quoted}} and \\n all.\n"
MACHINE: Final = Machine("cpu", 2, 2, "CPU", is_fixed=False)
IMPORTED: Final = Path(__file__).parents[1] / "examples/import"


def make_readers(folder: Path) -> list[Reader]:
    """Return all readers; their examples are made in an empty folder."""
    return [*_configs(folder), *_data(folder), *make_folders(folder)]


def _one(name: str, content: bytes | str) -> dict[str, Any]:
    data = content.encode() if isinstance(content, str) else content
    return {"files": {name: data}, "aims": (name,)}


def _configs(folder: Path) -> list[Reader]:
    """Configs of ours and of others, calibrations, plans and rows."""
    plan = folder / "plan.json"
    with contextlib.redirect_stdout(io.StringIO()):
        cli(["plan", *TINY, "cluster.calibration=shipped", "--top", "1", "--save", str(plan)])
    calibration = (
        '[about]\ndate = "2026-01-01"\nsource = "here"\nhad_core = 0.9\n[cpu]\n'
        '"matmul.fp32" = 0.5\nkernel_s = 1e-5\n[cpu.link]\nlatency = 1e-6\n"inner.gbs" = 3.5\n'
    )
    row = {"id": 1, "model": "llama", "hidden": 4096, "layers": 4, "heads": 32, "seq": 4096}
    row |= {"gpus": 8, "hardware": "H100", "gbs": 8, "tp": 2, "ffn": 11008, "vocab": 32000}

    small = load_config(None, TINY)
    case = Case(small.model, small.train, Layout())

    def config(at: Path) -> None:
        found = load_config(at / "run.toml")
        resolve_layout(found, MACHINE)
        to_toml(found)

    def imported(name: str, system: Any) -> Callable[[Path], None]:
        def read(at: Path) -> None:
            found = import_files([at / name], system=system, devices=8)
            if not found.report.refused:
                build_config(found.given)

        return read

    readers = [
        Reader("config.toml", **_one("run.toml", to_toml(load_config(None, TINY))), read=config),
        Reader("plan.json", **_one("plan.json", plan.read_bytes()), read=_plan),
        Reader("calibration.toml", **_one("c.toml", calibration), read=_calibration),
        Reader("case.json", **_one("case.json", case.as_json()), read=_case),
        Reader("rows.jsonl", **_one("rows.jsonl", json.dumps(row)), read=_rows),
    ]
    examples = {
        "deepspeed": ("ds.json", json.dumps(DEEPSPEED)),
        "gpt-neox": ("neox.yml", NEOX),
        "megatron": ("run.sh", MEGATRON),
        "hf": ("config.json", json.dumps(LLAMA)),
    }
    for system, (name, text) in examples.items():
        readers.append(Reader(f"{system} {name}", **_one(name, text), read=imported(name, system)))
    return readers


DEEPSPEED: Final = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "activation_checkpointing": {"partition_activations": False},
}
NEOX: Final = """\
{ "pipe_parallel_size": 1, "model_parallel_size": 2, "num_layers": 4, "hidden_size": 64,
  "num_attention_heads": 4, "seq_length": 128, "max_position_embeddings": 128, "pos_emb": "rotary",
  "rotary_pct": 0.25, "no_weight_tying": true, "gpt_j_residual": true, "norm": "layernorm",
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4, "train_iters": 100,
  "lr_decay_iters": 100, "lr_decay_style": "cosine", "warmup": 0.01, "fp16": {"enabled": true},
  "attention_config": [[["global"], 4]], "data_path": "data/x", "vocab_file": "v.json" }
"""
MEGATRON: Final = """\
GPUS=8
MODEL_ARGS="--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
torchrun --nproc_per_node $GPUS pretrain_gpt.py $MODEL_ARGS --max-position-embeddings 128 \\
  --micro-batch-size 2 --global-batch-size $((2*8)) --lr 1e-4 --train-iters 10 --bf16 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --swiglu --use-rope \\
  --position-embedding-type rope --normalization RMSNorm --disable-bias-linear \\
  --vocab-size 1000 --split 99,1,0 --clip-grad 1.0 --lr-decay-style cosine
"""
LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def _plan(at: Path) -> None:
    resolve_layout(load_planned(at / "plan.json"), MACHINE)


def _calibration(at: Path) -> None:
    config = load_config(None, [*TINY, f"cluster.calibration={at / 'c.toml'}"])
    read_calibration(at / "c.toml").of(config.model, config.train.seq_len)


def _rows(at: Path) -> None:
    words = ["predict", "--rows", str(at / "rows.jsonl"), "--out", str(at / "out")]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli(words) in (0, 1, 2)


def _case(at: Path) -> None:
    text = (at / "case.json").read_text(encoding="utf-8", errors="surrogateescape")
    case_of_json(text)


def _data(folder: Path) -> list[Reader]:
    """Sources of text, prepared stores, pairs of Megatron, tokenizers."""
    texts = [TEXT.format(n=n) for n in range(8)]
    jsonl = "".join(json.dumps({"text": text, "n": [n]}) + "\n" for n, text in enumerate(texts))
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerows([["id", "text"], *([n, text] for n, text in enumerate(texts))])
    sources: dict[str, bytes] = {
        "a.jsonl": jsonl.encode(),
        "a.json": json.dumps([{"text": text} for text in texts]).encode(),
        "a.csv": table.getvalue().encode(),
        "a.jsonl.gz": gzip.compress(jsonl.encode()),
        "a.txt": "<|endoftext|>".join(texts).encode(),
    }
    with contextlib.suppress(ImportError):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
        sources["a.parquet"] = (folder / "a.parquet").read_bytes()

    def documents(name: str) -> Callable[[Path], None]:
        def read(at: Path) -> None:
            source = Files((at / name,), "text", None)
            source.fingerprint()
            for part in source.parts():
                for text in source.documents(part):
                    text.encode()

        return read

    readers = [
        Reader(name, **_one(name, data), read=documents(name)) for name, data in sources.items()
    ]
    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_bytes(sources["a.txt"])
    train_bpe(texts, 300, text)
    (text / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    names = ("tokenizer.json", "tokenizer_config.json")
    own = {name: (text / name).read_bytes() for name in names}
    readers.append(Reader("tokenizer.json", own, names, _tokenizer))
    source = Files((text / "a.txt",), "text", None)
    prepare([source], str(text / "tokenizer.json"), folder / "store", workers=1)
    files = files_of(folder / "store")
    files = {name: data for name, data in files.items() if not name.startswith(".")}
    readers.append(Reader("store", files, tuple(files), _store, _seal_store))
    write_megatron(folder / "pair", open_store(folder / "store").shards, 300)
    names = ("pair.idx", "pair.seal.json", "pair.bin")
    pair = {name: (folder / name).read_bytes() for name in names}
    readers.append(Reader("pair.idx", pair, names[:2], _pair, _seal_pair))
    return readers


def _pair(at: Path) -> None:
    shard = open_megatron(at / "pair").shard
    shard.read(0, len(shard.tokens))


def _seal_pair(at: Path) -> None:
    path = at / "pair.seal.json"
    body = json.loads(path.read_text())
    for suffix, record in body.items():
        found = hash_file(at / f"pair{suffix}")
        record |= {"bytes": found.size, "sha256": found.sha256, "blocks": found.blocks}
    path.write_text(json.dumps(body))


def _tokenizer(at: Path) -> None:
    found = load_tokenizer(str(at))
    ids = found.encode("the cat sat on mat 7, naïve 日本語 🙂\n")
    found.decode([*ids, found.eos_id])


def _store(at: Path) -> None:
    verify(at)
    found = open_store(at)
    found.counts()
    found.tokenizer()


def _seal_store(at: Path) -> None:
    path = at / "manifest.json"
    body = json.loads(path.read_text())
    for record in _records(body):
        data = (at / record["file"]).read_bytes()
        record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    body.pop("digest", None)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"digest": digest, **body}))


def _records(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        own = [value] if "file" in value and "sha256" in value else []
        return [*own, *(found for one in value.values() for found in _records(one))]
    if isinstance(value, list):
        return [found for one in value for found in _records(one)]
    return []
