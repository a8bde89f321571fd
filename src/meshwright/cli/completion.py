"""`meshwright completion`: completes commands, options, config keys and their values in a shell."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, cast, get_args, get_origin

from meshwright.cli.main import COMMANDS, Command
from meshwright.errors import EXIT_DONE
from meshwright.spec.loading import ALIASES, KEYS, SECTIONS
from meshwright.spec.presets import PRESETS, catalogue_rows

EXAMPLE: Final = """\
examples:
  eval "$(meshwright completion bash)"              in ~/.bashrc
  eval "$(meshwright completion zsh)"               in ~/.zshrc, after compinit
  meshwright completion fish | source               in ~/.config/fish/config.fish
"""

# Bash breaks words at "=", so its own words are not used, and it wants only what follows the last.
_BASH: Final = """\
_meshwright() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$' \\t' words word candidate
  read -ra words <<< "$line"
  [[ "$line" == *[[:space:]] ]] && words+=("")
  word="${words[${#words[@]}-1]}"
  COMPREPLY=()
  while IFS= read -r candidate; do
    [[ "$candidate" == *= ]] || candidate+=" "
    COMPREPLY+=("${candidate#"${word%"${word##*=}"}"}")
  done < <(IFS=$'\\t'; "${words[0]}" completion --words="${words[*]:1}" 2> /dev/null)
}
complete -o nospace -o default -F _meshwright meshwright
"""
_ZSH: Final = """\
_meshwright() {
  local -a candidates
  local line="${(pj:\\t:)words[2,CURRENT]}"
  candidates=("${(@f)$(${words[1]} completion --words="$line" 2> /dev/null)}")
  compadd -S '' -- ${(M)candidates:#*=}
  compadd -- ${${candidates:#*=}:#}
  (( compstate[nmatches] )) || _files
}
compdef _meshwright meshwright
"""
_FISH: Final = """\
complete --command meshwright --arguments \\
  '(set --local words (commandline -opc)[2..] (commandline -ct)
    meshwright completion --words=(string join \\t -- $words) 2> /dev/null)'
"""
SHELLS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion` to the parser."""
    parser.description = "Print what a shell needs to complete commands, options and config keys."
    parser.epilog = EXAMPLE
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("shell", nargs="?", choices=SHELLS)
    # What the scripts call: words of a command line, by tabs; the last one is completed.
    chosen.add_argument("--words", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print the script of a shell, or how a command line may go on."""
    if args.shell is not None:
        print(SHELLS[args.shell], end="")
    else:
        print(
            "".join(f"{candidate}\n" for candidate in completions(args.words.split("\t"))), end=""
        )
    return EXIT_DONE


def completions(arguments: Sequence[str]) -> list[str]:
    """Return what the last of a command line's arguments may become, in order; no files.

    `arguments` are the words after `meshwright`. An empty one gets only subcommands,
    so that a shell offers files there.
    """
    *before, word = arguments
    if not before:
        return sorted(name for name in COMMANDS if name.startswith(word))
    if before[0] not in COMMANDS:
        return []
    usage, subcommands = _usage(before)
    if word.startswith("-"):
        return sorted({text for text in re.findall(r"--[\w-]+", usage) if text.startswith(word)})
    possible = [*subcommands, *(_settings(word) if word else ())]
    return sorted({text for text in possible if text.startswith(word)})


class _Parser(argparse.ArgumentParser):
    """A parser that keeps its subcommands, by name."""

    subcommands: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})

    def add_subparsers(self, **kwargs: Any) -> Any:
        """Add subcommands, as argparse does."""
        subparsers = super().add_subparsers(**kwargs)
        self.subcommands = subparsers.choices
        return subparsers


def _usage(before: Sequence[str]) -> tuple[str, Iterable[str]]:
    """Return the usage of the command that some words begin, and its subcommands still to come."""
    parser = _Parser(prog="meshwright")
    module = cast(Command, importlib.import_module(f"meshwright.cli.{before[0]}"))
    module.configure(parser)
    if len(before) == 1:
        return parser.format_usage(), parser.subcommands
    return parser.subcommands.get(before[1], parser).format_usage(), ()


def _settings(word: str) -> Iterator[str]:
    """Yield `key=` for each config key, or `key=value` for the values of a key that is named."""
    key, equals, _ = word.partition("=")
    if equals:
        alias = ALIASES.get(key)
        section, _, name = (key if alias is None else alias.key).partition(".")
        if name in KEYS.get(section, ()):
            yield from (f"{key}={value}" for value in _values(section, name))
        return
    for section, names in KEYS.items():
        yield from (f"{section}.{name}=" for name in names)
    yield from (f"{alias}=" for alias in ALIASES)


def _values(section: str, name: str) -> Iterable[str]:
    """Return the values that a key may have, if these are few."""
    if (section, name) == ("model", "preset"):
        return PRESETS
    if (section, name) == ("cluster", "preset"):
        return catalogue_rows()["devices"]
    return sorted(set(_listed(SECTIONS[section].model_fields[name].annotation)))


def _listed(annotation: Any) -> Iterator[str]:
    """Yield the values of the literals and booleans in a type."""
    if annotation is bool:
        yield from ("false", "true")
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for part in get_args(annotation):
            yield from _listed(part)
