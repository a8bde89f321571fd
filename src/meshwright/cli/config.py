"""`meshwright config`: the resolved config with the origin of each value, or the schema."""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.cli.common import add_config_arguments, add_json, print_json, read_config
from meshwright.errors import EXIT_DONE
from meshwright.launch.machine import detect
from meshwright.launch.planned import settled
from meshwright.layout import resolve_layout
from meshwright.program.parts import parameter_count
from meshwright.spec.loading import Config, config_schema
from meshwright.units import format_count

EXAMPLE = """\
examples:
  meshwright config show run.toml model.dim=512
  meshwright config schema > meshwright.schema.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `config`."""
    parser.description = "Show the resolved config and where each value came from, or its schema."
    parser.epilog = EXAMPLE
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="the resolved config, each value with its origin")
    add_config_arguments(show)
    add_json(show)
    schema = actions.add_parser("schema", help="the JSON Schema of a config file")
    add_json(schema)


def run(args: argparse.Namespace) -> int:
    """Print the schema, or the config that the arguments name."""
    if args.action == "schema":
        print_json(config_schema())
        return EXIT_DONE
    config = read_config(args)
    machine = detect(config.cluster, os.environ)
    config = settled(config, machine)
    layout = resolve_layout(config, machine)
    values = config.model_dump(mode="json")
    if args.json:
        print_json(
            {
                section: {
                    key: {"value": value, "origin": config.origins[f"{section}.{key}"]}
                    for key, value in content.items()
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


def _print_tables(config: Config) -> None:
    table = Table("key", "value", "origin", box=None, pad_edge=False)
    for section, content in config.model_dump(mode="json").items():
        for key, value in content.items():
            name = f"{section}.{key}"
            origin = config.origins[name]
            style = "dim" if origin == "default" else "bold"
            shown = "-" if value is None else str(value)
            table.add_row(name, Text(shown, style), Text(origin, "dim"))
    Console().print(table)
