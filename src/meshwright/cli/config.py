"""`meshwright config`: prints the resolved config or its schema, or imports another system's."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.cli.common import (
    add_accept,
    add_config_arguments,
    add_json,
    print_json,
    read_config,
)
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.interop.flat import SYSTEMS
from meshwright.layout import resolve_layout
from meshwright.runtime.machines.machine import detect, lacks_compiler
from meshwright.runtime.pricing.planned import settled
from meshwright.spec.dump import given_toml, toml_value
from meshwright.spec.loading import KEYS, Config, config_schema
from meshwright.spec.parts import parameter_count
from meshwright.units import format_count

EXAMPLE = """\
examples:
  meshwright config show run.toml model.dim=512
  meshwright config schema > meshwright.schema.json
  meshwright config import ds_config.json --base run.toml --out imported.toml
  meshwright config import 125M.yml local_setup.yml --devices 8 --out imported.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `config` and their arguments to the parser."""
    parser.description = "Show the resolved config with origins, its schema, or import another's."
    parser.epilog = EXAMPLE
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="the resolved config, each value with its origin")
    add_config_arguments(show)
    add_json(show)
    schema = actions.add_parser("schema", help="the JSON Schema of a config file")
    add_json(schema)
    _configure_import(actions.add_parser("import", help="another system's config, key by key"))


def _configure_import(parser: argparse.ArgumentParser) -> None:
    parser.description = "Turn another system's config into a Meshwright one, with a verdict a key."
    parser.add_argument(
        "words",
        nargs="+",
        metavar="FILE | section.key=value",
        help="DeepSpeed JSON, GPT-NeoX YAML (several are merged), Hugging Face config.json, or a "
        "file with Megatron arguments; then overrides",
    )
    parser.add_argument("--from", dest="system", choices=SYSTEMS, help="left out: seen by the file")
    parser.add_argument("--base", type=Path, metavar="CONFIG.toml", help="what the file leaves out")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="ranks in all; left out, those of this machine"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the TOML here, not to stdout"
    )
    add_accept(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand of `config` and return the exit code."""
    if args.action == "schema":
        print_json(config_schema())
        return EXIT_DONE
    if args.action == "import":
        return _import(args)
    config = read_config(args)
    machine = detect(config.cluster, os.environ)
    config = settled(config, machine, lacks_compiler(machine.device, os.environ))
    layout = resolve_layout(config, machine)
    values = config.model_dump(mode="json")
    if args.json:
        print_json(
            {
                section: {
                    key: {"value": content[key], "origin": config.origins[f"{section}.{key}"]}
                    for key in KEYS[section]
                }
                for section, content in values.items()
            }
            | {"resolved_layout": layout.model_dump(mode="json")}
        )
        return EXIT_DONE
    _print_tables(config)
    degrees = ", ".join(f"{axis} {n}" for axis, n in layout.model_dump().items())
    Console().print(f"layout here: {degrees}", highlight=False)
    print(f"parameters: {format_count(parameter_count(config.model))}")
    return EXIT_DONE


def _import(args: argparse.Namespace) -> int:
    """Import another system's config: print what became of each key, and write the TOML.

    The TOML goes to stdout without `--out`, and the report then to stderr. Raises `ConfigError`,
    after the report, if keys that matter cannot be translated.
    """
    # Not at the top: what they bring would slow down `show` and `--help`.
    from meshwright.cli.imports import import_config, print_report, settle
    from meshwright.files import write_atomic

    files = [Path(word) for word in args.words if "=" not in word]
    if not files:
        raise ConfigError("config import needs a file: DeepSpeed JSON, GPT-NeoX YAML, ...")
    imported = import_config(
        files,
        [word for word in args.words if "=" in word],
        base=args.base,
        accept=args.accept,
        system=args.system,
        devices=args.devices,
    )
    toml = given_toml(imported.given)
    if args.json:
        print_json(imported.report.as_json() | {"toml": toml})
    else:
        print_report(imported.report, sys.stdout if args.out else sys.stderr)
    settle(imported, args.devices)
    if args.out:
        write_atomic(args.out, toml.encode())
    elif not args.json:
        print(toml)
    return EXIT_DONE


def _print_tables(config: Config) -> None:
    table = Table("key", "value", "origin", box=None, pad_edge=False)
    for section, content in config.model_dump(mode="json").items():
        for key in KEYS[section]:
            value, name = content[key], f"{section}.{key}"
            origin = config.origins[name]
            style = "dim" if origin == "default" else "bold"
            shown = value if isinstance(value, str) else "-" if value is None else toml_value(value)
            table.add_row(name, Text(shown, style), Text(origin, "dim"))
    Console().print(table)
