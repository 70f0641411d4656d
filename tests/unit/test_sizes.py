"""No file over 400 lines and no function over 60 lines of code without a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import distft

PACKAGE = Path(distft.__file__).parent
LINES, FUNCTION_LINES = 400, 60
# Lines that a file may have, and why it is one.
FILES = {
    "formulas/families.py": (600, "one table of families, read from top to bottom"),
    "formulas/native.py": (490, "memory and traffic of torch's engines, which share their terms"),
    "formulas/peak.py": (490, "the moments of one step, in their order"),
    "formulas/reports.py": (450, "two reports and how each prints"),
    "measure/dry_run.py": (460, "one run without ranks, from the model to its report"),
    "peft.py": (490, "all that knows PEFT's names"),
    "spec.py": (545, "one value, with what makes and checks it"),
    "trainer/trainer.py": (420, "one subclass: what it replaces of TRL's trainer, in its order"),
}
# Lines of code that a function may have.
FUNCTIONS = {
    "checkpoint/save.py save_checkpoint": (70, "the order of a save, where each meeting counts"),
    "formulas/deepspeed.py zero_memory": (95, "one line of the report after another"),
    "formulas/parallel.py parallel_memory": (75, "one line of the report after another"),
}


def test_files_are_short_or_have_a_reason():
    sizes = {
        path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8").count("\n")
        for path in PACKAGE.rglob("*.py")
    }
    long = {name: size for name, size in sizes.items() if size > FILES.get(name, (LINES,))[0]}
    assert not long, long
    assert all(sizes[name] > LINES for name in FILES), "A reason is no longer needed."


def test_functions_are_short_or_have_a_reason():
    sizes = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(PACKAGE).as_posix()} {node.name}"
                sizes[name] = max(sizes.get(name, 0), _code_lines(node))
    allowed = {name: FUNCTIONS.get(name, (FUNCTION_LINES,))[0] for name in sizes}
    long = {name: size for name, size in sizes.items() if size > allowed[name]}
    assert not long, long
    assert all(sizes[name] > FUNCTION_LINES for name in FUNCTIONS), "A reason is no longer needed."


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    size = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        assert first.end_lineno is not None
        size -= first.end_lineno - first.lineno + 1
    return size
