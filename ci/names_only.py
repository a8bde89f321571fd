"""Prove that the Python files of a change differ in local names, docstrings and comments alone.

    python3 -m ci.names_only REVISION [PATH...]     what is checked out, beside a commit

The syntax trees must be equal up to the names of variables and parameters, and in each outermost
function every old name must have one new name of its own; the variables of a comprehension and the
parameters of a lambda are its own. Callers that pass a renamed parameter by
keyword differ in a keyword, which is reported as a note for a reader to check.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def names_changed(before: str, after: str) -> list[str]:
    """Return what is different besides local names, docstrings and comments, empty if nothing.

    A line ends in `keyword OLD -> NEW` where a call's keyword changed with a parameter.
    """
    differences: list[str] = []
    trees = (without_docstrings(ast.parse(before)), without_docstrings(ast.parse(after)))
    _compare(*trees, differences, {}, {})
    return differences


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Return the tree with every docstring removed, in place."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _compare(
    old: object, new: object, differences: list[str], forth: dict[str, str], back: dict[str, str]
) -> None:
    """Add what differs between two nodes; `forth` and `back` map the names of the function."""
    if isinstance(old, ast.AST) and type(old) is type(new):
        if isinstance(old, (ast.FunctionDef, ast.AsyncFunctionDef)) and not forth.get(""):
            forth, back = {"": old.name}, {"": old.name}
        outer_forth, outer_back = forth, back
        old_variables, new_variables = _own_variables(old), _own_variables(new)
        if old_variables or new_variables:
            forth = {name: value for name, value in forth.items() if name not in old_variables}
            back = {name: value for name, value in back.items() if name not in new_variables}
        for field in old._fields:
            values = getattr(old, field, None), getattr(new, field, None)
            if _is_name(old, field):
                _match(old, *values, differences, forth, back)
            else:
                _compare(*values, differences, forth, back)
        if old_variables or new_variables:
            outer_forth |= {k: v for k, v in forth.items() if k not in old_variables}
            outer_back |= {k: v for k, v in back.items() if k not in new_variables}
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for pair in zip(old, new, strict=True):
            _compare(*pair, differences, forth, back)
    elif old != new:
        place = forth.get("", "module")
        differences.append(f"{place}: {_shown(old)} -> {_shown(new)}")


def _own_variables(node: ast.AST) -> set[str]:
    """Return the names that a comprehension or a lambda binds for itself alone."""
    if isinstance(node, ast.Lambda):
        return {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    if not isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return set()
    targets = (target for loop in node.generators for target in ast.walk(loop.target))
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_name(node: ast.AST, field: str) -> bool:
    """Tell whether a field of a node is a variable's or a parameter's name."""
    return (type(node).__name__, field) in {
        ("Name", "id"),
        ("arg", "arg"),
        ("ExceptHandler", "name"),
        ("Nonlocal", "names"),
        ("keyword", "arg"),
    }


def _match(
    node: ast.AST,
    old: object,
    new: object,
    differences: list[str],
    forth: dict[str, str],
    back: dict[str, str],
) -> None:
    """Check that a name has one counterpart in its function."""
    if isinstance(old, list) and isinstance(new, list):
        for pair in zip(old, new, strict=True):
            _match(node, *pair, differences, forth, back)
    elif isinstance(node, ast.keyword):
        if old != new:
            line = f"line {node.value.lineno}: keyword {old} -> {new}"
            differences.append(f"{forth.get('', 'module')}, {line}")
    elif old is None or new is None:
        if old is not new:
            differences.append(f"{forth.get('', 'module')}: {old} -> {new}")
    elif forth.setdefault(str(old), str(new)) != new or back.setdefault(str(new), str(old)) != old:
        place = forth.get("", "module")
        differences.append(f"{place}: {old} -> {new} beside {forth[str(old)]}")


def _shown(value: object) -> str:
    return ast.unparse(value)[:80] if isinstance(value, ast.AST) else repr(value)[:80]


def main(arguments: list[str]) -> int:
    """Print every difference that is not a name, and return 1 if there is any."""
    revision, *paths = arguments
    changed = subprocess.run(
        ["git", "diff", "--name-only", revision, "--", *(paths or ["*.py"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    count = 0
    for path in changed:
        shown = subprocess.run(
            ["git", "show", f"{revision}:{path}"], cwd=ROOT, capture_output=True, text=True
        )
        if shown.returncode or not (ROOT / path).exists():
            print(f"{path}: added or deleted")
            count += 1
            continue
        for difference in names_changed(shown.stdout, (ROOT / path).read_text()):
            print(f"{path}: {difference}")
            count += " keyword " not in difference
    print(f"{len(changed)} files differ from {revision}, {count} differences besides names")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
