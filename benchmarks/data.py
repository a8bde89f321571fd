"""Tokenising a corpus, and waiting for it: `data prepare` beside datasets' map and Megatron's tool.

    python -m benchmarks.data --megatron PYTHON --rounds 3 --out docs/benchmarks/data.json

The same jsonl (sources of Python's standard library, tests included) and the same byte-level BPE
(of 8,192 entries, trained on them) for all, with as many processes as cores. Each side runs in a
process of its own, in turns; its seconds are those of the work, without imports. All must find the
same number of tokens. `PYTHON` is an interpreter that has megatron-core; without it that side is
left out. Then the demo trains for some steps on a store, a blend and a stream: the share of a step
that waits for data. The last line is the command to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

VOCAB = 8192
EOS = "<|endoftext|>"
ROOT = Path(__file__).parents[1]


def side_prepare(rows: Path, tokenizer: Path, out: Path, processes: int) -> tuple[float, int]:
    """Meshwright: text to an indexed store with hashes."""
    from meshwright.data import prepare
    from meshwright.data.corpora import Files

    started = time.perf_counter()
    store = prepare([Files((rows,))], str(tokenizer), out / "store", workers=processes)
    return time.perf_counter() - started, store.manifest.tokens


def side_datasets(rows: Path, tokenizer: Path, out: Path, processes: int) -> tuple[float, int]:
    """HF datasets: jsonl to Arrow, then a batched map."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    backend = Tokenizer.from_file(str(tokenizer))
    eos = backend.token_to_id(EOS)

    def encode(batch: dict) -> dict:
        found = backend.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[*one.ids, eos] for one in found]}

    started = time.perf_counter()
    cache = str(out / "cache")
    data = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=cache)
    mapped = data.map(encode, batched=True, num_proc=processes, remove_columns=["text"])
    seconds = time.perf_counter() - started
    return seconds, sum(map(len, mapped.with_format("arrow")["input_ids"]))


def start_worker(tokenizer: str) -> None:
    """Load the tokenizer of a worker of Megatron's tool, which keeps it in a global as well."""
    from tokenizers import Tokenizer

    start_worker.backend = Tokenizer.from_file(tokenizer)  # type: ignore[attr-defined]


def encode_line(line: str) -> list[int]:
    backend = start_worker.backend  # type: ignore[attr-defined]
    ids = backend.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return [*ids, backend.token_to_id(EOS)]


def side_megatron(rows: Path, tokenizer: Path, out: Path, processes: int) -> tuple[float, int]:
    """tools/preprocess_data.py of Megatron-LM: a pool encodes, one process writes."""
    import multiprocessing

    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    started, tokens = time.perf_counter(), 0
    builder = IndexedDatasetBuilder(str(out / "pair.bin"), dtype=np.uint16)
    with (
        rows.open(encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(
            processes, initializer=start_worker, initargs=(str(tokenizer),)
        ) as pool,
    ):
        for ids in pool.imap(encode_line, lines, 32):
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
        builder.finalize(str(out / "pair.idx"))
    return time.perf_counter() - started, tokens


SIDES = {"prepare": side_prepare, "datasets": side_datasets, "megatron": side_megatron}


def texts() -> Iterator[str]:
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                text = path.read_text("utf-8")
                text.encode()
            except UnicodeError:
                continue
            if text.strip():
                yield text


def make_corpus(folder: Path, size: int) -> tuple[Path, Path, int]:
    """Write the jsonl and train the tokenizer; returns both and the bytes of text."""
    from itertools import cycle, islice

    from meshwright.data import train_bpe

    found = list(texts())
    rows, written = folder / "rows.jsonl", 0
    with rows.open("w", encoding="utf-8") as file:
        for text in cycle(found):
            if written >= size:
                break
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
    tokenizer = train_bpe(islice(found, 0, None, 8), VOCAB, folder / "tokenizer.json")
    return rows, tokenizer, written


def run_side(name: str, python: str, folder: Path, processes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        words = ["--side", name, "--folder", str(folder), "--work", out]
        done = subprocess.run(
            [python, __file__, *words, "--processes", str(processes)],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HOME": out, "PYTHONPATH": str(ROOT / "src")},
        )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def shares(folder: Path, steps: int) -> dict[str, float]:
    """Train the demo on a store, a blend and a stream; the median share of waiting for data."""
    rows, halves = folder / "rows.jsonl", []
    for half in range(2):
        path = folder / f"half-{half}.jsonl"
        lines = rows.read_text("utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[half:200:2]), "utf-8")
        halves.append(str(path))
    sources = {
        "store": ["data.source=stdlib"],
        "blend": [f"data.source={json.dumps(halves)}", "data.weights=[3, 1]"],
        "stream": [f"data.source=hf:{rows}", "data.streaming=true"],
    }
    found = {}
    for name, words in sources.items():
        where = [f"log.dir={folder}", f"log.name={name}", f"data.cache={folder}"]
        length = [f"train.steps={steps}", "train.log_every=1", "train.eval_every=0", "log.trace=0"]
        command = [sys.executable, "-m", "meshwright", "train", str(ROOT / "examples/demo.toml")]
        subprocess.run([*command, *words, *where, *length], check=True, capture_output=True)
        events = map(json.loads, (folder / name / "events.jsonl").open())
        steps_ = [event for event in events if event["event"] == "step"][1:]
        found[name] = {
            "median": statistics.median(event["data_time_share"] for event in steps_),
            "mean": sum(e["data_time_share"] * e["step_time_s"] for e in steps_)
            / sum(e["step_time_s"] for e in steps_),
            "step_time_s": statistics.median(event["step_time_s"] for event in steps_),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    if args.side:
        inputs = (args.folder / "rows.jsonl", args.folder / "tokenizer.json")
        seconds, tokens = SIDES[args.side](*inputs, args.work, args.processes)
        print(json.dumps({"seconds": seconds, "tokens": tokens}))
        return
    pythons = {"prepare": sys.executable, "datasets": sys.executable}
    if args.megatron:
        pythons["megatron"] = args.megatron
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, _, size = make_corpus(folder, args.megabytes * 10**6)
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in pythons}
        for number in range(args.rounds):
            for side in list(pythons)[:: 1 if number % 2 == 0 else -1]:
                runs[side].append(run_side(side, pythons[side], folder, args.processes))
                print(f"{side}: {size / runs[side][-1]['seconds'] / 1e6:.2f} MB/s", flush=True)
        waiting = shares(folder, args.steps)
    tokens = {run["tokens"] for found in runs.values() for run in found}
    if len(tokens) != 1:
        raise SystemExit(f"the sides found different numbers of tokens: {runs}")
    rates = {
        side: statistics.median(size / run["seconds"] / 1e6 for run in found)
        for side, found in runs.items()
    }
    result = {
        "text_bytes": size,
        "tokens": tokens.pop(),
        "processes": args.processes,
        "megabytes_per_s": rates,
        "seconds": {side: [run["seconds"] for run in found] for side, found in runs.items()},
        "data_time_share": waiting,
        "machine": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.data {' '.join(sys.argv[1:])}",
    }
    if args.megatron:
        result["command"] = result["command"].replace(args.megatron, "PYTHON")
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
