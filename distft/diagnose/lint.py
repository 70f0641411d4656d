"""Finding collectives that not every rank makes, in the text of a script.

Nothing is run. What is found is a collective under a condition on the rank, a save that the main
process makes alone, and a loop that one rank may leave by itself: by a value of its own batch or
its own clock, or by an error that it alone swallows. A line with ``# distft: ignore`` is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distft.diagnose.lint_names import (
    LOCAL_CALLS,
    MATRICES,
    RANK_CALLS,
    RANK_VARIABLES,
    RANKS,
    SAVES,
    Names,
    last_name,
)
from distft.diagnose.lint_syntax import (
    assigned,
    compared_with_0,
    condition_of,
    contrary,
    inside,
    is_group_test,
    leaving_word,
    names_in,
    only_passes,
    own_expressions,
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
    # Names that get a number as it is written, and those that get anything else.
    numbers: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    found: list[tuple[Finding, str, str]] = field(default_factory=list)

    def findings(self) -> list[Finding]:
        """Return what is wrong in it, without what a test and its contrary both do."""
        self._learn()
        self._visit(self.body, _Where())
        made = {(collective, test) for _, collective, test in self.found}
        return [
            finding
            for finding, collective, test in self.found
            if not collective or (collective, contrary(test)) not in made
        ]

    def _learn(self) -> None:
        """Note which variables hold a rank, which a value of this rank, which a common one."""
        for node in inside(self.body):
            if isinstance(node, ast.Call) and self.names.collective(node):
                self.shared |= {name.id for argument in node.args for name in names_in(argument)}
        # Twice, for what is assigned from what is assigned further down.
        for node in [*inside(self.body), *inside(self.body)]:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name, value in assigned(target, node.value):
                    self._learn_one(name, value)

    def _learn_one(self, name: str, value: ast.expr) -> None:
        (self.numbers if isinstance(value, ast.Constant) else self.asked).add(name)
        if any(isinstance(n, ast.Call) and self.names.collective(n) for n in ast.walk(value)):
            self.shared.add(name)
        elif self._is_ranked(value):
            self.ranked.add(name)
        elif self._is_local(value):
            self.local.add(name)

    def _is_ranked(self, node: ast.expr) -> bool:
        """Return whether an expression differs between ranks since it asks for the rank."""
        first = compared_with_0(node)
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and last_name(part.func) in RANK_CALLS:
                return True
            if isinstance(part, ast.Attribute) and part.attr in RANKS:
                of_matrix = any(word in last_name(part.value) for word in MATRICES)
                if part.attr != "rank" or not of_matrix or part in first:
                    return True
            elif isinstance(part, ast.Name) and self._names_a_rank(part.id):
                return True
            if isinstance(part, ast.Constant) and part.value in RANK_VARIABLES:
                return True
        return False

    def _names_a_rank(self, name: str) -> bool:
        # One that only ever is a number of the script, as `rank = 16`, is none of a process.
        return name in self.ranked or (
            name in RANKS and not (name in self.numbers and name not in self.asked)
        )

    def _is_local(self, node: ast.expr) -> bool:
        """Return whether an expression is a number of this rank's own batch, clock or files."""
        if any(name.id in self.shared for name in names_in(node)):
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
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                inner = replace(where, loop=node)
                if isinstance(node, ast.While) and self._is_ranked(node.test):
                    inner = replace(inner, tests=(*where.tests, condition_of(node.test)))
                self._visit(node.body, inner)
                self._visit(node.orelse, where)
            elif isinstance(node, ast.Try | ast.TryStar):
                self._try(node, where)
            elif isinstance(node, ast.With | ast.AsyncWith):
                self._visit(node.body, where)
            elif isinstance(node, ast.Match):
                self._match(node, where)

    def _if(self, node: ast.If, where: _Where) -> _Where:
        """Visit both branches; return what the statements after depend on."""
        ranked = self._is_ranked(node.test) and not is_group_test(node.test)
        text, line = condition_of(node.test)
        inner = outer = where
        if ranked:
            inner = replace(where, tests=(*where.tests, (text, line)))
            outer = replace(where, tests=(*where.tests, (contrary(text), line)))
        self._visit(node.body, inner)
        self._visit(node.orelse, outer if node.orelse else where)
        leaves = leaving_word(node.body)
        # A rank that raises ends the run; one that leaves in silence goes on elsewhere.
        silent = leaves not in ("", "raise")
        if silent and where.loop is not None and not ranked and self._is_local(node.test):
            self._leaves_loop(node, leaves, where.loop)
        parted = ranked and silent and not node.orelse
        return outer if parted else where

    def _match(self, node: ast.Match, where: _Where) -> None:
        """Visit the cases; under a rank each is a test of its own."""
        for case in node.cases:
            inner = where
            if self._is_ranked(node.subject):
                test = f"{ast.unparse(node.subject)} == {ast.unparse(case.pattern)}"
                inner = replace(where, tests=(*where.tests, (test, node.lineno)))
            self._visit(case.body, inner)

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

    def _try(self, node: ast.Try | ast.TryStar, where: _Where) -> None:
        made = self._made_in(ast.Module(list(node.body), []))
        for handler in node.handlers:
            word = leaving_word(handler.body) or ("pass" if only_passes(handler.body) else "")
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
        calls = [part for part in inside([node]) if isinstance(part, ast.Call)]
        collective = next((name for c in calls if (name := self.names.collective(c))), "")
        if collective:
            return f"`{collective}`"
        methods = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute)}
        return "`backward` and `step`" if {"backward", "step"} <= methods else ""

    def _calls(self, node: ast.stmt, where: _Where) -> None:
        """Note the collectives of a statement itself, without its blocks."""
        for part in own_expressions(node):
            self._calls_in(part, where.tests)

    def _calls_in(self, node: ast.AST, tests: tuple[tuple[str, int], ...]) -> None:
        """Note those of an expression; `a and b` and `b if a else c` are conditions too."""
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.IfExp) and self._is_ranked(node.test):
            text, line = condition_of(node.test)
            self._calls_in(node.test, tests)
            self._calls_in(node.body, (*tests, (text, line)))
            self._calls_in(node.orelse, (*tests, (contrary(text), line)))
            return
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self._calls_in(value, tests)
                if self._is_ranked(value):
                    text, line = condition_of(value)
                    met = text if isinstance(node.op, ast.And) else contrary(text)
                    tests = (*tests, (met, line))
            return
        if isinstance(node, ast.Call) and tests:
            self._note(node, tests[-1])
        for child in ast.iter_child_nodes(node):
            self._calls_in(child, tests)

    def _note(self, call: ast.Call, where: tuple[str, int]) -> None:
        """Note a call under a test of the rank, if it is a collective of all ranks."""
        collective = self.names.collective(call)
        # A group of some ranks is used by those alone.
        if not collective or any(k.arg in ("group", "process_group") for k in call.keywords):
            return
        test, line = where
        saves = last_name(call.func) in SAVES
        rule = "save-by-rank" if saves else "collective-by-rank"
        reason = "gathers what the other ranks hold" if saves else "waits for every rank"
        text = (
            f"`{collective}` {reason}, and is made under `{test}` (line {line}) by some ranks "
            "alone, so they wait for ever. Call it on every rank, and put only what touches "
            "files or the log under the condition."
        )
        self.found.append((Finding(self.path, call.lineno, rule, text), collective, test))
