"""The pages say what the library says, and name what is there."""

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import distft
from distft.commands import _parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = re.compile(r"^```(?:sh|bash|console)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
NAMED_FILE = re.compile(r"`((?:tests|benchmarks|examples|docs)/[\w./-]+)`")


def _generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_and_pictures_are_those_that_the_library_makes():
    stale = [
        str(path.relative_to(ROOT))
        for path, text in _generator().generated().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    assert not stale, f"Run python docs/generate.py: it would change {stale}."


def test_every_public_name_is_in_the_reference():
    shown = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        shown |= set(re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE))
    submodules = {name: importlib.import_module(f"distft.{name}") for name in distft._SUBMODULES}
    public = {f"distft.{name}" for name in distft.__all__ if name not in submodules}
    for name, module in submodules.items():
        public |= {f"distft.{name}.{each}" for each in module.__all__}
    assert public <= shown, sorted(public - shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text("utf-8")
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    missing += [name for name in NAMED_FILE.findall(text) if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_a_page_parses(page):
    for code in PYTHON.findall(page.read_text("utf-8")):
        ast.parse(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_commands(page):
    shell = "\n".join(SHELL.findall(page.read_text("utf-8")))
    for line in re.findall(r"^(?:python -m )?distft (.*)$", shell, re.MULTILINE):
        # It ends the test with the parser's own words where it is none.
        _parser(given := shlex.split(line, comments=True)).parse_args(given)
