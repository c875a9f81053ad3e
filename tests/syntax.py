"""Files of Python as trees, read and walked once for all that is asked of them."""

import ast
from functools import cache
from pathlib import Path


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All that ``ast.walk`` yields, which takes several times as long."""
    found: list[ast.AST] = [ast.parse(file.read_text())]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
    return tuple(found)
