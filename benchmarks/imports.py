"""Imports every config below a folder: what share of its keys takes effect, and what is refused.

    python -m benchmarks.imports FOLDER... [--train N]

JSON, YAML and the ```json blocks of Markdown are read; a block is a config if DeepSpeed knows one
of its top keys. Blocks of documentation are fragments: braces are added, and a placeholder such as
[true|false] is read as its first value. With --train, N of the configs that are not refused are
trained for three steps at toy size, on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.interop.importing import Imported, import_files
from meshwright.interop.table import load_table
from meshwright.runtime.session import train
from meshwright.spec.loading import build_config

SIZES = [
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=4"),
    *("model.head_dim=8", "model.ffn_dim=64", "model.vocab_size=320", "model.context=64"),
]
TOY = [
    *SIZES,
    *("train.steps=3", "train.seq_len=32", "train.eval_every=0", "optimizer.warmup_steps=1"),
    *("data.source=stdlib", "data.tokenizer=bytes", "layout.pp=1", "layout.tp=1", "layout.cp=1"),
    *("log.dir=runs", "log.tensorboard=false", "checkpoint.every=0"),
    *("cluster.device=cpu", "cluster.devices_per_node=2", "train.log_every=1"),
]
BASE = "[layout]\nauto = false\n"


def blocks(page: Path, folder: Path) -> list[tuple[str, Path | None]]:
    """Return the config blocks of a page by name, each as a file; None where it is not JSON."""
    known = {key.split(".")[0] for key in load_table("deepspeed").rows}
    found: list[tuple[str, Path | None]] = []
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        name = f"{page.name}:{text[: match.start()].count(chr(10)) + 1}"
        content = parse(match[1])
        if content is None:
            found.append((name, None))
        elif content.keys() & known:
            path = folder / f"{name.replace(':', '-')}.json"
            path.write_text(json.dumps(content))
            found.append((name, path))
    return found


def parse(text: str) -> dict | None:
    """Return a documentation's block as an object, None where that takes more than brackets."""
    text = re.sub(r"\[(\w+)(?:\|\w+)+\]", r"\1", text.replace('"[cpu|nvme]"', '"cpu"'))
    text = re.sub(r"^\s*\.\.\.\s*$|//[^\n]*$|\((?:deprecated)[^)]*\)", "", text, flags=re.M)
    text = re.sub(r'"\s*=\s*', '": ', text).replace("None", "null").replace("'", '"')
    text = re.sub(r",(\s*[}\]])", r"\1", text)
    text = text.strip().rstrip(",")
    for attempt in (text, f"{{{text}}}", re.sub(r"\}\s*\}$", "}", text)):
        try:
            content = json.loads(attempt)
        except ValueError:
            continue
        if isinstance(content, dict):
            return content
    return None


def configs(folders: list[Path], scratch: Path) -> list[tuple[str, Path | None]]:
    found: list[tuple[str, Path | None]] = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix == ".md":
                found += blocks(path, scratch)
            elif path.suffix in (".json", ".yml", ".yaml"):
                found.append((str(path.relative_to(folder)), path))
    return found


def toy(path: Path, base: Path) -> Imported:
    """Import a config at toy size; the file's batch stays, unless it is too large for that."""
    for batch in ([], ["train.batch=8", "layout.microbatch=2"]):
        imported = import_files(
            [path],
            base=base,
            overrides=[*TOY, f"checkpoint.dir=saved-{path.stem}", *batch],
            devices=2,
            is_fixed=True,
        )
        found = imported.given["train"].get("batch")
        if not imported.report.refused and (found is None or found.value <= 64):
            break
    return imported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--train", type=int, default=0, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        base = scratch / "base.toml"
        base.write_text(BASE)
        found = configs([folder.resolve() for folder in args.folders], scratch)
        good = table(found)
        os.chdir(scratch)
        spread = good[:: max(1, len(good) // max(1, args.train))][: args.train]
        for title, path in spread:
            run(title, path, base)


def table(found: list[tuple[str, Path | None]]) -> list[tuple[str, Path]]:
    """Print a row for each config; return those of the taken that are worth training."""
    good, shares, keys, taken = [], [], 0, 0
    print("| config | keys | take effect | ignored | unsupported | refused for |")
    print("|---|---|---|---|---|---|")
    for title, path in found:
        if path is None:
            print(f"| `{title}` |  |  |  |  | not JSON: a placeholder |")
            continue
        try:
            report = import_files([path], devices=64, is_fixed=path.suffix != ".json").report
        except MeshwrightError as error:
            print(f"| `{title}` |  |  |  |  | {' '.join(str(error).split())[:80]} |")
            continue
        sections = list(dict.fromkeys(entry.key for entry in report.refused))
        why = ", ".join(f"`{key}`" for key in sections[:2]) + (" ..." if len(sections) > 2 else "")
        print(
            f"| `{title}` | {report.keys} | {report.share:.0%} | {report.count('ignored')} | "
            f"{report.count('unsupported') + report.count('contradictory')} | {why} |"
        )
        shares.append(report.share * report.keys)
        keys += report.keys
        sets = {key for entry in report.entries for key in entry.to}
        if not report.refused:
            taken += 1
        # Worth training: some keys, and no service that must be installed
        if not report.refused and len(sets) > 1 and "log.wandb" not in sets:
            good.append((title, path))
    print(
        f"\n{len(shares)} configs, {keys} keys: {sum(shares) / max(1, keys):.0%} take effect; "
        f"{taken} configs are taken over, {len(shares) - taken} refused\n"
    )
    return good


def run(title: str, path: Path, base: Path) -> None:
    """Train three steps of a config at toy size, and print the losses."""
    imported = toy(path, base)
    try:
        config = build_config({name: dict(v) for name, v in imported.given.items()})
        finished = train(config, out=open(os.devnull, "w"))  # noqa: SIM115
    except MeshwrightError as error:
        print(f"{title}: {' '.join(str(error).split())[:300]}")
        return
    events = (Path(finished.folder) / "events.jsonl").read_text().splitlines()
    losses = [e["loss"] for e in map(json.loads, events) if e.get("event") == "step"]
    told = " ".join(f"{loss:.3f}" for loss in losses)
    layout, settings = config.layout, config.train
    print(
        f"{title}: {settings.precision}, zero {layout.zero}, offload {layout.offload}, "
        f"batch {settings.batch}: losses {told}",
        flush=True,
    )


if __name__ == "__main__":
    main()
