"""Finding collectives that not every rank makes, in the text of a script.

Nothing is run. What is found is a collective under a condition on the rank, a save that the main
process makes alone, and a loop that one rank may leave by itself: by a value of its own batch or
its own clock, or by an error that it alone swallows. A line with ``# distft: ignore`` is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distft.diagnose.lint_names import (
    LOCAL_CALLS,
    RANK_CALLS,
    RANK_VARIABLES,
    RANKS,
    SAVES,
    Names,
    last_name,
)

IGNORE = "distft: ignore"


@dataclass(frozen=True)
class Finding:
    """One place where ranks may wait for each other.

    Attributes:
        path: The file.
        line: Its line, from 1.
        rule: ``"collective-by-rank"``, ``"save-by-rank"``, ``"rank-leaves-loop"`` or
            ``"rank-swallows-error"``.
        text: What it is, and the way out.
    """

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        """Say it as compilers do."""
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def lint(paths: Iterable[str | Path]) -> list[Finding]:
    """Return the places in scripts where not every rank makes a collective, by file and line.

    Args:
        paths: Python files, and folders that hold them.

    Raises:
        ValueError: A file is not there, or is no Python.

    Collective: none.
    """
    found: list[Finding] = []
    for path in paths:
        root = Path(path)
        if not root.exists():
            raise ValueError(f"{root} is 0 files. Pass a Python script, or a folder with some.")
        for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            found += lint_text(file.read_text(encoding="utf-8"), str(file))
    return found


def lint_text(text: str, path: str = "<text>") -> list[Finding]:
    """Return the same for the text of one script.

    >>> [finding.rule for finding in lint_text('''
    ... import torch.distributed as dist
    ... if dist.get_rank() == 0:
    ...     dist.barrier()
    ... ''')]
    ['collective-by-rank']

    Raises:
        ValueError: It is no Python.

    Collective: none.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(
            f"{path} is no Python: {error.msg} in line {error.lineno}. Pass a script."
        ) from error
    names = Names(tree)
    if not names.is_distributed:
        return []
    lines = text.splitlines()
    scopes: list[Sequence[ast.stmt]] = [tree.body]
    scopes += [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = [finding for body in scopes for finding in _Scope(names, path, body).findings()]
    kept = {f for f in found if IGNORE not in lines[f.line - 1]}
    return sorted(kept, key=lambda finding: (finding.line, finding.rule))


@dataclass(frozen=True)
class _Where:
    """What the statements at hand depend on: tests of the rank, as text and line, and a loop."""

    tests: tuple[tuple[str, int], ...] = ()
    loop: ast.stmt | None = None


@dataclass
class _Scope:
    """One function, or a module outside of functions."""

    names: Names
    path: str
    body: Sequence[ast.stmt]
    ranked: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    found: list[tuple[Finding, str, str]] = field(default_factory=list)

    def findings(self) -> list[Finding]:
        """Return what is wrong in it, without what a test and its contrary both do."""
        self._learn()
        self._visit(self.body, _Where())
        made = {(collective, test) for _, collective, test in self.found}
        return [
            finding
            for finding, collective, test in self.found
            if not collective or (collective, _contrary(test)) not in made
        ]

    def _learn(self) -> None:
        """Note which variables hold a rank, which a value of this rank, which a common one."""
        for node in _inside(self.body):
            if isinstance(node, ast.Call) and self.names.collective(node):
                self.shared |= {name.id for argument in node.args for name in _names_in(argument)}
        # Twice, for what is assigned from what is assigned further down.
        for node in [*_inside(self.body), *_inside(self.body)]:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            into = {target.id for target in targets if isinstance(target, ast.Name)}
            if any(isinstance(n, ast.Call) and self.names.collective(n) for n in ast.walk(node)):
                self.shared |= into
            elif self._is_ranked(node.value):
                self.ranked |= into
            elif self._is_local(node.value):
                self.local |= into

    def _is_ranked(self, node: ast.expr) -> bool:
        """Return whether an expression differs between ranks since it asks for the rank."""
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and last_name(part.func) in RANK_CALLS:
                return True
            if isinstance(part, ast.Attribute) and part.attr in RANKS:
                return True
            if isinstance(part, ast.Name) and (part.id in self.ranked or part.id in RANKS):
                return True
            if isinstance(part, ast.Constant) and part.value in RANK_VARIABLES:
                return True
        return False

    def _is_local(self, node: ast.expr) -> bool:
        """Return whether an expression is a number of this rank's own batch, clock or files."""
        if any(name.id in self.shared for name in _names_in(node)):
            return False
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and last_name(part.func) in LOCAL_CALLS:
                return True
            if isinstance(part, ast.Name) and part.id in self.local:
                return True
        return False

    def _visit(self, body: Sequence[ast.stmt], where: _Where) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                # A function is a scope of its own, a class body holds functions.
                continue
            self._calls(node, where)
            if isinstance(node, ast.If):
                where = self._if(node, where)
            elif isinstance(node, ast.For | ast.While):
                inner = replace(where, loop=node)
                if isinstance(node, ast.While) and self._is_ranked(node.test):
                    inner = replace(inner, tests=(*where.tests, _test_of(node.test)))
                self._visit(node.body, inner)
                self._visit(node.orelse, where)
            elif isinstance(node, ast.Try):
                self._try(node, where)
            elif isinstance(node, ast.With):
                self._visit(node.body, where)

    def _if(self, node: ast.If, where: _Where) -> _Where:
        """Visit both branches; return what the statements after depend on."""
        ranked = self._is_ranked(node.test) and not _is_group_test(node.test)
        text, line = _test_of(node.test)
        inner = outer = where
        if ranked:
            inner = replace(where, tests=(*where.tests, (text, line)))
            outer = replace(where, tests=(*where.tests, (_contrary(text), line)))
        self._visit(node.body, inner)
        self._visit(node.orelse, outer if node.orelse else where)
        leaves = _leaves(node.body)
        if leaves and where.loop is not None and not ranked and self._is_local(node.test):
            self._leaves_loop(node, leaves, where.loop)
        # A rank that raises ends the run; one that leaves in silence goes on elsewhere.
        parted = ranked and leaves not in ("", "raise") and not node.orelse
        return outer if parted else where

    def _leaves_loop(self, node: ast.If, word: str, loop: ast.stmt) -> None:
        made = self._made_in(loop)
        if not made:
            return
        text = (
            f"`{word}` is decided by `{ast.unparse(node.test)}`, which each rank has for itself, "
            f"in a loop with {made}: a rank that leaves alone lets the others wait. Sum the value "
            "over ranks first, as all_reduce or StepResult.loss do."
        )
        self.found.append((Finding(self.path, node.lineno, "rank-leaves-loop", text), "", ""))

    def _try(self, node: ast.Try, where: _Where) -> None:
        made = self._made_in(ast.Module(list(node.body), []))
        for handler in node.handlers:
            word = _leaves(handler.body) or ("pass" if _only_passes(handler.body) else "")
            if made and where.loop is not None and word not in ("", "raise"):
                kind = ast.unparse(handler.type) if handler.type else "everything"
                text = (
                    f"`except {kind}` goes on with `{word}` after {made}: a rank that meets the "
                    "error alone makes fewer collectives than the others. Let it end the run, or "
                    "agree on it over all ranks."
                )
                rule = "rank-swallows-error"
                self.found.append((Finding(self.path, handler.lineno, rule, text), "", ""))
            self._visit(handler.body, where)
        for part in (node.body, node.orelse, node.finalbody):
            self._visit(part, where)

    def _made_in(self, node: ast.AST) -> str:
        """Return what a loop or a block makes that every rank must make, in words, or nothing."""
        calls = [part for part in _inside([node]) if isinstance(part, ast.Call)]
        collective = next((name for c in calls if (name := self.names.collective(c))), "")
        if collective:
            return f"`{collective}`"
        methods = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute)}
        return "`backward` and `step`" if {"backward", "step"} <= methods else ""

    def _calls(self, node: ast.stmt, where: _Where) -> None:
        """Note the collectives of a statement itself, without its blocks."""
        if not where.tests:
            return
        for call in _own_calls(node):
            collective = self.names.collective(call)
            groups = [k for k in call.keywords if k.arg in ("group", "process_group")]
            if not collective or groups:
                # A group of some ranks is used by those alone.
                continue
            test, line = where.tests[-1]
            saves = last_name(call.func) in SAVES
            rule = "save-by-rank" if saves else "collective-by-rank"
            reason = "gathers what the other ranks hold" if saves else "waits for every rank"
            text = (
                f"`{collective}` {reason}, and is made under `{test}` (line {line}) by some ranks "
                "alone, so they wait for ever. Call it on every rank, and put only what touches "
                "files or the log under the condition."
            )
            self.found.append((Finding(self.path, call.lineno, rule, text), collective, test))


def _inside(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of statements, without those of functions and classes among them."""
    for node in body:
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
            ):
                yield from _inside([child])


def _own_calls(node: ast.stmt) -> Iterator[ast.Call]:
    parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node, ast.With):
        parts += [item.context_expr for item in node.items]
    yield from (part for part in _inside(parts) if isinstance(part, ast.Call))


def _names_in(node: ast.AST) -> list[ast.Name]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Name)]


def _test_of(test: ast.expr) -> tuple[str, int]:
    return ast.unparse(test), test.lineno


def _is_group_test(test: ast.expr) -> bool:
    """Return whether a test asks if this rank is in a set of ranks, which may have a group."""
    return isinstance(test, ast.Compare) and any(
        isinstance(op, ast.In | ast.NotIn) and not isinstance(of, ast.List | ast.Tuple | ast.Set)
        for op, of in zip(test.ops, test.comparators, strict=True)
    )


def _contrary(test: str) -> str:
    """Return the test that holds where this one does not, written as it would be.

    >>> _contrary("rank == 0"), _contrary("not main"), _contrary("main")
    ('rank != 0', 'main', 'not main')
    """
    node = ast.parse(test, mode="eval").body
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


def _leaves(body: Sequence[ast.stmt]) -> str:
    """Return the word by which a block leaves what it is in, or nothing."""
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


def _only_passes(body: Sequence[ast.stmt]) -> bool:
    return all(isinstance(node, ast.Pass) for node in body)
