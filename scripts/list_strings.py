"""Prints every user-visible string, file by file: windows, commands, errors, events, reports.

    python scripts/list_strings.py [FOLDER ...]

Read the complete output before a release, to check for consistent terms and plain English (CONTRIBUTING.md).
Docstrings, keys, formats and names are left out; values in f-strings are shown as an ellipsis in braces.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("app/kvscope_app", "engine/kvscope_engine", "engine/kvscope_telemetry", "kernels/kvscope_kernels")
_WORDS = re.compile(r"[A-Za-z]{2,}[a-z',.:…)]* +[\w(“\"'{<-]|^[A-Z][a-z]{2,}[ .:…?]?$|^[A-Z][a-z]+…$")
_CODE = re.compile(
    r"^[<.#/@]|::|[{};]\s*$|^\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|PRAGMA|QWidget|Q[A-Z])|font-|padding|margin:"
)
_SKIPPED_CALLS = {"field", "compile", "getLogger", "cast", "TypeVar", "getattr", "setattr", "hasattr", "encode", "Path"}


def user_visible_strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    hidden = _hidden_nodes(tree)
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if _WORDS.search(text) and not _CODE.search(text):
            yield node.lineno, " ".join(text.split())


def _hidden_nodes(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes of strings that users do not see: docstrings, annotations, constant parts of f-strings (printed
    as a whole), assertion messages, and arguments of calls in `_SKIPPED_CALLS`.
    """
    hidden: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            hidden.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            hidden.update(node.values)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            hidden.update(ast.walk(node.msg))
        elif isinstance(node, ast.AnnAssign):
            hidden.update(ast.walk(node.annotation))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs):
                if argument.annotation is not None:
                    hidden.update(ast.walk(argument.annotation))
            if node.returns is not None:
                hidden.update(ast.walk(node.returns))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _SKIPPED_CALLS:
                hidden.update(part for argument in node.args for part in ast.walk(argument))
    return hidden


def main() -> None:
    for folder in sys.argv[1:] or FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = dict.fromkeys(sorted(user_visible_strings(ast.parse(path.read_text("utf-8")))))
            if lines:
                print(f"\n{path.relative_to(ROOT)}")
            for line, text in lines:
                print(f"{line:5d}  {text}")


if __name__ == "__main__":
    main()
