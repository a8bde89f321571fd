"""`meshwright checkpoint push`: exports a run and uploads it to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshwright.checkpoint.commit import read_manifest
from meshwright.checkpoint.push import CARD, check_push, push
from meshwright.cli.common import print_json, say_line
from meshwright.errors import EXIT_DONE, ConfigError, refusal
from meshwright.files import read_text
from meshwright.parsing import parse_json
from meshwright.prove.verdict import Verdict
from meshwright.report.model_card import CardFacts, Claim, StatedProof, model_card
from meshwright.report.record import RunRecord, read_run
from meshwright.spec.hub import hub_id, repository_name
from meshwright.spec.stored import find_step, stored_base
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.checkpoint.hf_exchange import Exchanged

_SECTIONS: Final = {"model", "data", "train", "optimizer"}  # that a model card states


def configure_push(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only `push` has; those of an export are `export-hf`'s."""
    parser.add_argument("repository", metavar="REPO_ID", help="owner/name, created if missing")
    parser.add_argument(
        "--public", action="store_true", help="for everyone to read; without it, private"
    )
    parser.add_argument(
        "--proof",
        type=Path,
        metavar="FILE",
        help="the output of `prove CONFIG --json`, whose verdicts the model card states",
    )
    parser.add_argument(
        "--replace-card",
        action="store_true",
        help="replace the model card; without it, one in the repository stays",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="export and verify, and list the files; send nothing, and need no token",
    )


def push_export(args: argparse.Namespace, source: Path, done: Exchanged) -> int:
    """Add a model card to an exported folder and upload it; return the exit code."""
    run, manifest = _record_of(source)
    facts = CardFacts(
        repository=args.repository,
        parameters=done.parameters,
        dtype=done.dtype,
        tokenizer=done.tokenizer,
        is_adapter=args.adapter,
        base=args.base or stored_base(source),
        checks=tuple(_claim(check) for check in done.checks),
        not_checked=done.not_checked,
        manifest=manifest,
        proof=None if args.proof is None else read_proof(args.proof, run),
    )
    (done.out / CARD).write_text(model_card(run, facts), encoding="utf-8")
    sizes = {**done.files, CARD: (done.out / CARD).stat().st_size}
    for name, size in sorted(sizes.items()):
        say_line(f"{format_bytes(size):>10}  {name}", sys.stderr if args.json else sys.stdout)
    total, visibility = format_bytes(sum(sizes.values())), "public" if args.public else "private"
    if args.dry_run:
        summary: dict[str, Any] = {"repository": args.repository, "private": not args.public}
        summary |= {"files": sizes, "bytes": sum(sizes.values()), "commit": None, "url": None}
        text = f"nothing was sent: {len(sizes)} files, {total}, to {args.repository}, {visibility}"
    else:
        pushed = push(done.out, args.repository, public=args.public, replace_card=args.replace_card)
        visibility = "private" if pushed.private else "public"
        text = f"pushed {len(pushed.files)} files to {pushed.url}, {visibility}: {pushed.commit}"
        if pushed.kept_card:
            text += f". Its {CARD} is as before; --replace-card writes a new one"
        summary = {"repository": args.repository, "private": pushed.private}
        summary |= {"files": dict(pushed.files), "bytes": sum(pushed.files.values())}
        summary |= {"commit": pushed.commit, "url": pushed.url}
    if args.json:
        print_json({"source": str(source), **summary, "card": model_card(run, facts)})
    else:
        say_line(text)
    return EXIT_DONE


def check_before(args: argparse.Namespace, source: Path) -> None:
    """Raise `ConfigError` for what would make a push fail after the export."""
    repository_name(args.repository)
    if args.proof is not None:
        read_proof(args.proof, _record_of(source)[0])
    base = args.base or stored_base(source)
    if args.adapter and (base is None or hub_id(base) is None):
        rule = f"the adapters' base model is {base or 'not known'}, which others cannot load"
        raise ConfigError(refusal(rule, hint="--base owner/name says where it is on the Hub"))
    if not args.dry_run:
        check_push(args.repository)


def push_folder(repository: str) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for the export; TMPDIR says where."""
    return tempfile.TemporaryDirectory(prefix=f"meshwright-push-{repository.replace('/', '-')}-")


def read_proof(path: Path, run: RunRecord | None) -> StatedProof:
    """Return the verdicts in a file of `prove CONFIG --json`.

    Raises `ConfigError` if it is none, or is about another layout than the run's.
    """
    try:
        document = parse_json(read_text(path))
        layout = document["asked"]["layout"]
        claims = tuple(
            _claim(Verdict.from_dict({key: v for key, v in values.items() if key != "case"}))
            for values in document["verdicts"]
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        rule = f"--proof {path} cannot be read as the output of `meshwright prove CONFIG --json`"
        raise ConfigError(f"{rule}: {error}") from error
    if run is not None and run.layout is not None and layout != run.layout.label:
        raise ConfigError(f"--proof {path} is about {layout}, and the run's is {run.layout.label}")
    return StatedProof(str(layout), claims)


def _claim(verdict: Any) -> Claim:
    """Return the claim of a verdict, or of a check of an export."""
    if isinstance(verdict, Verdict):
        return Claim(verdict.claim, verdict.passed, verdict.error, verdict.tolerance)
    bound = verdict.tolerance
    return Claim(verdict.claim, verdict.passed, verdict.observed if bound else None, bound or None)


def _record_of(source: Path) -> tuple[RunRecord | None, dict[str, Any]]:
    """Return the run that a source is of, and the manifest of the step that is exported."""
    step = find_step(source)
    manifest = {} if step is None else read_manifest(step)
    for folder in (source, *source.resolve().parents[:2]):
        try:
            run = read_run(folder)
        except ConfigError:
            continue
        return (run if run.values.keys() >= _SECTIONS else None), manifest
    return None, manifest
