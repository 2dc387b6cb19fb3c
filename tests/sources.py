"""The files of the package, read and parsed once for all tests that look at them."""

import ast
import functools
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1] / "autoshard"
FILES = sorted(PACKAGE.rglob("*.py"))


def names(path: pathlib.Path) -> str:
    return str(path.relative_to(PACKAGE))


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    """Every node of a file."""
    return [*ast.walk(ast.parse(path.read_text()))]


@functools.cache
def imports(path: pathlib.Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import in a file, also those inside functions."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the absolute import"
            found.append((node.lineno, node.module or ""))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found
