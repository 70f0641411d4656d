"""Questions to Python's syntax trees that the lint asks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from distft.diagnose.lint_names import last_name


def inside(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of statements, without those of functions and classes among them.

    Collective: none.
    """
    for node in body:
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
            ):
                yield from inside([child])


def own_expressions(node: ast.stmt) -> list[ast.expr]:
    """Return the expressions of a statement itself, without its blocks.

    Collective: none.
    """
    parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node, ast.With | ast.AsyncWith):
        parts += [item.context_expr for item in node.items]
    return parts


def names_in(node: ast.AST) -> list[ast.Name]:
    """Return the names in a node.

    Collective: none.
    """
    return [part for part in ast.walk(node) if isinstance(part, ast.Name)]


def condition_of(test: ast.expr) -> tuple[str, int]:
    """Return a test as text, and its line.

    Collective: none.
    """
    return ast.unparse(test), test.lineno


def is_group_test(test: ast.expr) -> bool:
    """Return whether a test asks if this rank is in a set of ranks, which may have a group.

    Collective: none.
    """
    return isinstance(test, ast.Compare) and any(
        isinstance(op, ast.In | ast.NotIn) and not isinstance(of, ast.List | ast.Tuple | ast.Set)
        for op, of in zip(test.ops, test.comparators, strict=True)
    )


def contrary(test: str) -> str:
    """Return the test that holds where this one does not, written as it would be.

    >>> contrary("rank == 0"), contrary("not main"), contrary("main")
    ('rank != 0', 'main', 'not main')

    Collective: none.
    """
    try:
        node = ast.parse(test, mode="eval").body
    except SyntaxError:
        # The pattern of a case, as in `rank == 1 | 2 as n`, is no expression.
        return f"not ({test})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        swapped: dict[type, ast.cmpop] = {
            ast.Eq: ast.NotEq(),
            ast.NotEq: ast.Eq(),
            ast.In: ast.NotIn(),
            ast.NotIn: ast.In(),
        }
        op = swapped.get(type(node.ops[0]))
        if op is not None:
            return ast.unparse(ast.Compare(node.left, [op], node.comparators))
    return (
        f"not {test}"
        if isinstance(node, ast.Name | ast.Attribute | ast.Call)
        else (f"not ({test})")
    )


def leaving_word(body: Sequence[ast.stmt]) -> str:
    """Return the word by which a block leaves what it is in, or nothing.

    Collective: none.
    """
    last = body[-1] if body else None
    for kind, word in (
        (ast.Break, "break"),
        (ast.Continue, "continue"),
        (ast.Return, "return"),
        (ast.Raise, "raise"),
    ):
        if isinstance(last, kind):
            return word
    called = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
    name = last_name(last.value.func) if called else ""  # type: ignore[union-attr]
    return name if name in ("exit", "_exit") else ""


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that an assignment gives a value to, and its value or its part of it.

    Collective: none.
    """
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        paired = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        for index, part in enumerate(target.elts):
            yield from assigned(part, value.elts[index] if paired else value)  # type: ignore[attr-defined]


def compared_with_0(node: ast.expr) -> list[ast.expr]:
    """Return what an expression compares with 0, as a rank is and the rank of a matrix is not.

    Collective: none.
    """
    return [
        part.left
        for part in ast.walk(node)
        if isinstance(part, ast.Compare)
        and isinstance(part.ops[0], ast.Eq | ast.NotEq)
        and isinstance(part.comparators[0], ast.Constant)
        and part.comparators[0].value == 0
    ]


def only_passes(body: Sequence[ast.stmt]) -> bool:
    """Return whether a block does nothing.

    Collective: none.
    """
    return all(isinstance(node, ast.Pass) for node in body)
