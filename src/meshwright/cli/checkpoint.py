"""`meshwright checkpoint`: lists saved steps, and converts to and from Hugging Face folders."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshwright.checkpoint.commit import LOCK, prune, steps
from meshwright.checkpoint.inspect import StepFacts, checkpoints_of, inspect
from meshwright.cli import push
from meshwright.cli.common import add_json, local_folder, model_folder, print_json
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_DONE
from meshwright.runtime.supervise.lock import RunLock
from meshwright.spec.stored import StoredTokenizer, stored_base
from meshwright.spec.training import DataFormat
from meshwright.store import StorePath, place
from meshwright.training.in_store import fetch
from meshwright.training.run_folder import tokenizer_of
from meshwright.units import format_bytes, format_count, parse_bytes

if TYPE_CHECKING:
    from meshwright.checkpoint.hf_exchange import Exchanged

EXPORT = """\
example:
  meshwright checkpoint export-hf runs/latest exported --dtype bf16
"""
IMPORT = """\
example:
  meshwright checkpoint import-hf exported imported
  meshwright train model.init_from=imported
"""


INSPECT = """\
example:
  meshwright checkpoint inspect runs/latest
"""
VERIFY = """\
example:
  meshwright checkpoint verify runs/latest
"""
PRUNE = """\
example:
  meshwright checkpoint prune runs/latest --keep 1
"""
PUSH = """\
example:
  meshwright checkpoint push runs/latest owner/name --dry-run
"""
FETCH = """\
example:
  meshwright checkpoint fetch s3://bucket/run here
"""


class Subcommand(NamedTuple):
    """A subcommand: its description, example, and functions that add its arguments and run it."""

    text: str
    example: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `checkpoint` and their arguments to the parser."""
    parser.description = "Checkpoints: look at them, and exchange them with Hugging Face."
    parser.epilog = "examples:\n" + "".join(
        action.example.split("\n", 1)[1] for action in ACTIONS.values()
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, action in ACTIONS.items():
        command = actions.add_parser(
            name,
            help=action.text,
            description=action.text[0].upper() + action.text[1:] + ".",
            epilog=action.example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.configure(command)
        add_json(command)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand of `checkpoint` and return the exit code."""
    return ACTIONS[args.action].run(args)


def _configure_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", help="a run, or one of its step folders")


def _inspect(args: argparse.Namespace) -> int:
    return _say_steps(inspect(place(args.source)), args.json)


def _verify(args: argparse.Namespace) -> int:
    return _say_steps(inspect(place(args.source), verified=True), args.json)


def _say_steps(steps: list[StepFacts], as_json: bool) -> int:
    if as_json:
        print_json({"steps": [facts.as_dict() for facts in steps]})
    for facts in () if as_json else steps:
        if facts.problem is not None:
            print(f"BAD  step {facts.step}: {facts.problem}")
            continue
        seen = f", {format_count(facts.tokens)} tokens" if facts.tokens is not None else ""
        by = f", {facts.layout} on {facts.world} ranks" if facts.layout else ", weights only"
        word = "good" if facts.is_verified else "    "
        contents = f"{format_bytes(facts.bytes)} in {facts.files} files"
        print(f"{word} step {facts.step}: {contents}{by}{seen}")
    return EXIT_CHECK_FAILED if any(facts.problem for facts in steps) else EXIT_DONE


def _configure_prune(parser: argparse.ArgumentParser) -> None:
    _configure_steps(parser)
    parser.add_argument(
        "--keep", type=_count, required=True, metavar="N", help="steps to keep, the newest"
    )


def _prune(args: argparse.Namespace) -> int:
    root = checkpoints_of(place(args.source))
    with contextlib.ExitStack() as stack:
        if isinstance(root, Path):  # a run would miss what it counts on; stores have no locks
            stack.enter_context(RunLock(root / LOCK, folder_kind="checkpoint folder"))
        gone = [str(path) for path in prune(root, args.keep)]
    if args.json:
        print_json({"removed": gone, "kept": [str(path) for path in steps(root)]})
    else:
        print(f"removed {len(gone)} steps, kept {len(steps(root))} in {root}")
    return EXIT_DONE


def _configure_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="URL", help="a run (its newest step), RUN/best, or a step"
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write: new or empty")


def _fetch(args: argparse.Namespace) -> int:
    out = fetch(StorePath.parse(args.source), Path(args.out))
    return _say_steps(inspect(out), args.json)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps; 1 or more")
    return int(text)


def _configure_export(parser: argparse.ArgumentParser) -> None:
    _configure_steps(parser)
    parser.add_argument("out", metavar="OUT", help="the folder to write: new or empty")
    _configure_form(parser)


def _configure_form(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say in which form a model is exported."""
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights")
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="BYTES",
        help="of each file of weights, as 500MB or 5GB (the default)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="'bytes', 'gpt2' or a tokenizer.json, if not the run's; 'none' writes none",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters alone, as a folder that PEFT loads; without it they are merged",
    )
    parser.add_argument(
        "--base",
        metavar="FOLDER_OR_NAME",
        help="where PEFT is to find the base model, if not at the run's model.init_from",
    )


def _export(args: argparse.Namespace) -> int:
    source = local_folder(args.source)
    return _report("exported", _exported(args, source, Path(args.out)), args.json)


def _exported(args: argparse.Namespace, source: Path, out: Path) -> Exchanged:
    from meshwright.checkpoint.hf_exchange import export_adapter, export_hf

    if args.adapter:
        return export_adapter(source, out, args.base or stored_base(source), args.dtype)
    tokenizer, form = _tokenizer(source, args.tokenizer)
    return export_hf(source, out, tokenizer, args.dtype, args.max_shard_size, form)


def _configure_push(parser: argparse.ArgumentParser) -> None:
    _configure_steps(parser)
    push.configure_push(parser)
    _configure_form(parser)


def _push(args: argparse.Namespace) -> int:
    source = local_folder(args.source)
    push.check_before(args, source)
    with push.push_folder(args.repository) as folder:
        done = _exported(args, source, Path(folder) / args.repository.partition("/")[2])
        if not done.passed:
            return _report("exported", done, args.json)
        return push.push_export(args, source, done)


def _configure_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="DIR", help="a Hugging Face folder with safetensors, or an id of the Hub"
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write: new or empty")


def _import(args: argparse.Namespace) -> int:
    from meshwright.checkpoint.hf_exchange import import_hf

    return _report("imported", import_hf(model_folder(args.source), Path(args.out)), args.json)


def _tokenizer(source: Path, asked: str | None) -> tuple[Tokenizer | None, DataFormat]:
    if asked == "none":
        return None, "text"
    stored = tokenizer_of(source) if asked is None else StoredTokenizer(asked)
    return load_tokenizer(stored.name, stored.eos, stored.bos), stored.form


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a file size")
    return size


def _report(verb: str, done: Exchanged, as_json: bool) -> int:
    if as_json:
        print_json(done.as_dict())
    else:
        for line in _lines(verb, done):
            print(line)
    if not done.passed:
        print(f"{done.out} was not written: a check failed", file=sys.stderr)
    return EXIT_DONE if done.passed else EXIT_CHECK_FAILED


def _lines(verb: str, done: Exchanged) -> list[str]:
    lines = []
    for check in done.checks:
        word, detail = ("passed", "") if check.passed else ("FAILED", f" ({_found(check)})")
        if check.passed and check.tolerance:
            detail = f" (off by {check.observed:.1e} of the largest, at most {check.tolerance:.0e})"
        lines.append(f"{word}  {check.claim}{detail}")
    if done.not_checked:
        lines.append(f"not checked by transformers: {done.not_checked}")
    if done.rounding is not None:
        moved = f"moves logits by up to {done.rounding:.1e} of the largest"
        lines.append(f"rounding to {done.dtype} {moved}")
    lines.append(f"tokenizer: {done.tokenizer or 'none'}")
    size, count = format_bytes(sum(done.files.values())), format_count(done.parameters)
    if done.passed:
        lines.append(
            f"{verb} {done.source} to {done.out}: {count} parameters in {done.dtype}, "
            f"{len(done.files)} files, {size}"
        )
    return lines


def _found(check: Any) -> str:
    if check.expected is None:
        return str(check.observed)
    text = f"expected {check.expected}, observed {check.observed}"
    if check.tolerance is not None:
        text += f", tolerance {check.tolerance:g}"
    return text if check.first_divergence is None else f"{text}, first {check.first_divergence}"


ACTIONS: Final = {
    "inspect": Subcommand("list the steps of a run", INSPECT, _configure_steps, _inspect),
    "verify": Subcommand("read every file and compare its hash", VERIFY, _configure_steps, _verify),
    "prune": Subcommand("remove all but the newest steps", PRUNE, _configure_prune, _prune),
    "fetch": Subcommand("copy a step from an object store", FETCH, _configure_fetch, _fetch),
    "export-hf": Subcommand(
        "write a run's model as a Hugging Face folder", EXPORT, _configure_export, _export
    ),
    "push": Subcommand(
        "export a run's model to the Hugging Face Hub", PUSH, _configure_push, _push
    ),
    "import-hf": Subcommand(
        "write a Hugging Face folder as a checkpoint", IMPORT, _configure_import, _import
    ),
}
