"""`meshwright eval`: perplexity on held-out text, and the tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from meshwright.checkpoint.weights import load_model
from meshwright.cli.common import add_json, model_folder, print_json, say, table
from meshwright.data import load_tokenizer
from meshwright.data.boundaries import ends_of
from meshwright.errors import EXIT_DONE, ConfigError, refusal
from meshwright.evaluate.perplexity import Perplexity, measure
from meshwright.evaluate.text import (
    BATCH_TOKENS,
    Conversations,
    Text,
    Windows,
    check_windows,
    given,
    held_out,
    run_of,
    windows_of,
)
from meshwright.models import Transformer
from meshwright.runtime.session import cache_folder
from meshwright.spec.loading import load_config
from meshwright.spec.model import ModelSpec
from meshwright.spec.stored import StoredTokenizer, find_step, stored_spec
from meshwright.spec.training import DataSpec
from meshwright.training.run_folder import tokenizer_of
from meshwright.units import format_seconds

EXAMPLE = """\
examples:
  meshwright eval runs/latest                              what the run has held out
  meshwright eval runs/latest --source book.txt --stride 64
  meshwright eval HF_DIR --source wiki.jsonl --limit 1000
  meshwright eval runs/latest --tasks lambada_openai       pip install 'meshwright[lm-eval]'
"""
# Without another word: rows as long as those of the run, or this.
SEQ_LEN = 2048
SAY_EVERY_S = 10.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval` to the parser."""
    parser.description = "Measure a model: perplexity on text that it was not trained on, or tasks."
    parser.epilog = EXAMPLE
    parser.add_argument("folder", metavar="RUN_OR_HF_DIR", help="or an id of the Hub")
    parser.add_argument("--seq-len", type=int, metavar="N", help="inputs of a row; the run's")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="number of rows, or of documents per task"
    )
    parser.add_argument("--batch", type=int, metavar="ROWS", help="rows at a time")
    parser.add_argument("--tokenizer", help="'bytes', 'gpt2' or a tokenizer.json, if not the run's")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU, where there is one")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    text = parser.add_argument_group("perplexity")
    text.add_argument(
        "--source",
        nargs="+",
        metavar="SOURCE",
        help="text instead of what the run held out: as data.source",
    )
    text.add_argument("--stride", type=int, metavar="N", help="tokens from row to row; --seq-len")
    text.add_argument(
        "--packing",
        choices=("stream", "documents"),
        help="documents: attention stays inside each; the run's, or stream",
    )
    text.add_argument(
        "--format", choices=("text", "chat"), help="what rows of --source hold; as the run's data"
    )
    text.add_argument("--text-key", default="text", metavar="KEY", help="field of jsonl rows")
    text.add_argument("--cache", metavar="DIR", help="folder for prepared text")
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--tasks", metavar="NAME,...", help="of lm-evaluation-harness")
    tasks.add_argument(
        "--include-path", type=Path, metavar="DIR", help="a folder with YAML files of more tasks"
    )
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="examples; the task's own")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check the arguments, measure perplexity or run tasks, and return the exit code."""
    folder = model_folder(args.folder)
    spec = stored_spec(folder)[0]
    for name in ("limit", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(refusal(f"--{name} {value} must be at least 1", legal=[1]))
    device = _device(args.device)
    of_tasks = ("include_path", "num_fewshot")
    for name in ("source", "stride", "packing", "format") if args.tasks else of_tasks:
        if getattr(args, name) is not None:
            problem = "is not for --tasks" if args.tasks else "is for --tasks"
            raise ConfigError(f"--{name.replace('_', '-')} {problem}")
    measured = _tasks if args.tasks else _perplexity
    return measured(args, folder, spec, device)


def _perplexity(args: argparse.Namespace, folder: Path, spec: ModelSpec, device: str) -> int:
    text = _text(args, folder, spec)
    seq_len = args.seq_len if args.seq_len is not None else text.seq_len
    context = spec.context - len(text.begin)
    seq_len = min(context, SEQ_LEN) if seq_len is None else seq_len
    windows = windows_of(text, seq_len, context, args.stride, args.packing)
    row_count = min(len(windows), args.limit or len(windows))
    if row_count == 0:
        raise ConfigError(f"{text.name} has {len(text.view)} tokens: there is none to predict")
    model = _load(folder, device, args.precision)
    started = time.perf_counter()
    batch = args.batch or max(1, BATCH_TOKENS[device] // seq_len)
    perplexity = measure(model, windows, text.tokenizer, row_count, batch, _progress())
    seconds = time.perf_counter() - started
    facts = _facts(folder, text, windows, perplexity) | {
        "device": device,
        "precision": args.precision,
        "seconds": seconds,
    }
    if args.json:
        print_json(facts)
    else:
        _print(facts)
    return EXIT_DONE


def _tasks(args: argparse.Namespace, folder: Path, spec: ModelSpec, device: str) -> int:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs lm-evaluation-harness: pip install 'meshwright[lm-eval]'")
    from meshwright.evaluate.harness import MeshwrightLM, run_tasks

    if args.include_path is not None and not args.include_path.is_dir():
        raise ConfigError(f"--include-path {args.include_path} is not a folder")
    stored = StoredTokenizer(args.tokenizer) if args.tokenizer else tokenizer_of(folder)
    tokenizer = load_tokenizer(stored.name, stored.eos, stored.bos)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids, the model "
            f"{spec.vocab_size}: it is not the model's"
        )
    job = run_of(folder)
    max_length = args.seq_len
    if max_length is None:
        max_length = spec.context if job is None else job.config.train.seq_len
    check_windows(max_length, 1, spec.context)
    batch_tokens = BATCH_TOKENS[device] if args.batch is None else args.batch * max_length
    model, ends = _load(folder, device, args.precision), ends_of(tokenizer, stored.form)
    lm = MeshwrightLM(model, tokenizer, max_length, batch_tokens, ends)
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    results = run_tasks(lm, names, args.include_path, args.num_fewshot, args.limit)
    if args.json:
        json_keys = ("results", "groups", "versions", "n-shot", "n-samples")
        print_json(
            {"model": str(folder), **{key: results[key] for key in json_keys if key in results}}
        )
        return EXIT_DONE
    printed = table("task", "metric", "value", "standard error")
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, how = key.partition(",")
            if isinstance(value, int | float) and how and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{how}")
                spread = f"{error:.4f}" if isinstance(error, int | float) else "-"
                metric_name = metric if how == "none" else f"{metric} ({how})"
                printed.add_row(task, metric_name, f"{value:.4f}", spread)
    Console().print(printed)
    return EXIT_DONE


def _text(args: argparse.Namespace, folder: Path, spec: ModelSpec) -> Text:
    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if args.source is None:
        if args.tokenizer:
            raise ConfigError("--tokenizer goes with --source: a run's own text has the run's")
        return held_out(folder, spec.vocab_size, note)
    stored = StoredTokenizer(args.tokenizer) if args.tokenizer else tokenizer_of(folder)
    form = args.format or stored.form
    data = DataSpec(
        format=form,
        packing="documents" if form == "chat" else "stream",
        source=tuple(args.source),
        tokenizer=stored.name,
        eos=stored.eos,
        bos=None if stored.bos is None else bool(stored.bos),
        text_key=args.text_key,
    )
    cache = Path(args.cache) if args.cache else cache_folder(load_config(), os.environ)
    return given(folder, data, cache, spec.vocab_size, note)


def _device(asked: str | None) -> str:
    """Return "cpu" or "cuda", by default a GPU if there is one.

    Raises `ConfigError` if a GPU is asked for and there is none.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            refusal("--device cuda, but no GPU of NVIDIA or AMD is visible", legal=["cpu"])
        )
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _load(folder: Path, device: str, precision: str) -> Transformer:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return load_model(folder).eval().to(device, dtype)


def _progress() -> Any:
    """Return a callback `(done, total)` that reports on stderr at most every ten seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > SAY_EVERY_S:
            last = time.monotonic()
            print(f"row {done} of {total}", file=sys.stderr, flush=True)

    return report


def _facts(
    folder: Path, text: Text, windows: Windows | Conversations, perplexity: Perplexity
) -> dict[str, Any]:
    step = find_step(folder)
    return {
        "model": str(folder if step is None else step),
        "text": text.name,
        "seq_len": windows.seq_len,
        "stride": windows.stride,
        "packing": windows.packing,
        "rows": perplexity.rows,
        "rows_in_all": len(windows),
        "tokens": perplexity.tokens,
        "bytes": perplexity.bytes,
        "nats_per_token": perplexity.nats_per_token,
        "stderr": perplexity.stderr,
        "perplexity": perplexity.perplexity,
        "bits_per_byte": perplexity.bits_per_byte,
    }


def _print(facts: dict[str, Any]) -> None:
    nats, stderr, bits = facts["nats_per_token"], facts["stderr"], facts["bits_per_byte"]
    printed = table("", "measured", "standard error")
    spread = "-" if stderr is None else f"{stderr:.4f}"
    printed.add_row("nats per token", f"{nats:.4f}", spread)
    around = "-" if stderr is None else f"{facts['perplexity'] * stderr:.4g}"
    printed.add_row("perplexity", f"{facts['perplexity']:.5g}", around)
    if bits is not None:
        bits_spread = "-" if stderr is None else f"{bits * stderr / nats:.4f}"
        printed.add_row("bits per byte", f"{bits:.4f}", bits_spread)
    say(f"{facts['model']} on {facts['text']}")
    Console().print(printed)
    is_subset = facts["rows"] < facts["rows_in_all"]
    of_all = f" of {facts['rows_in_all']}" if is_subset else ""
    tokens, seconds = facts["tokens"], facts["seconds"]
    say(
        f"{tokens} tokens, {facts['bytes']} bytes of text, in {facts['rows']}{of_all} rows of "
        f" {facts['seq_len']}, stride {facts['stride']}, packing {facts['packing']}; "
        f"{facts['precision']} on {facts['device']}, {format_seconds(seconds)}, "
        f"{tokens / max(seconds, 1e-9):.0f} tokens/s"
    )
