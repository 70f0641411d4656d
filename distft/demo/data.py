"""About two thousand chat examples that every machine already has: the standard library's docs.

A question names a function, class or method; the answer is the first sentence of its docstring. The
modules are a fixed list of ones that do nothing on import (no printing, no browser, no thread).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from distft.demo.errors import DemoError

_MODULES = """
    abc argparse array ast base64 bdb binascii bisect builtins bz2 calendar cmath cmd codecs
    collections collections.abc configparser contextlib contextvars copy csv dataclasses
    datetime decimal difflib dis doctest email.charset email.header email.headerregistry
    email.message email.parser email.policy email.utils enum filecmp fileinput fnmatch fractions
    functools glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookies
    inspect io ipaddress itertools json json.decoder json.encoder linecache logging
    logging.handlers lzma math mimetypes netrc numbers operator os os.path pathlib pickle
    pkgutil platform plistlib pprint pstats queue quopri random re sched secrets selectors
    shelve shlex shutil signal socket socketserver statistics string struct subprocess symtable
    sys tarfile tempfile textwrap threading time timeit tokenize traceback tracemalloc types
    unicodedata unittest urllib.parse urllib.request uuid warnings wave weakref xml.dom.minidom
    xml.etree.ElementTree xmlrpc.client zipfile zlib
"""

# Modules that implement a public one under another name: their objects belong to the public one.
_BACKING = {"posix", "nt", "posixpath", "ntpath", "genericpath"}

# torch.package puts a function of its own in this place.
_REPLACED = {"inspect.getfile"}

_ASK_CALL = ("What does {name} do?", "Explain {name}.", "What is {name}() for?")
_ASK_NOUN = ("What is {name}?", "Describe {name}.", "What does {name} stand for?")

_SHORTEST, _LONGEST = 20, 140


@dataclass(frozen=True)
class Example:
    """A question about one documented name and its answer.

    Attributes:
        name: The documented name with its module, such as ``"textwrap.dedent"``.
        question: One sentence that names it.
        answer: The first sentence of its docstring: one sentence of at most 140 characters.
    """

    name: str
    question: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The example as a chat: one user message and one assistant message."""
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": self.answer},
        ]


def examples(count: int = 2000) -> list[Example]:
    """Chat examples from the standard library's documentation, the same in every process.

    They are spread evenly over all documented names, in the order of the module list; no answer
    occurs twice.

    Args:
        count: How many to return. CPython 3.11 to 3.13 have over 2,700 such sentences.

    Raises:
        DemoError: If fewer than ``count`` docstrings exist (``python -OO`` strips them).

    Collective: none
    """
    found: dict[str, tuple[str, bool]] = {}
    for name, is_call, docstring in _documented():
        answer = _trim(docstring)
        if answer and answer not in found:
            found[answer] = (name, is_call)
    if len(found) < count:
        raise DemoError(
            f"{count} documented names are needed, but the standard library shows {len(found)}. "
            "Start Python without -OO and without PYTHONOPTIMIZE=2, which remove docstrings."
        )
    everything = list(found.items())
    chosen = [everything[i * len(everything) // count] for i in range(count)]
    return [_example(i, *item) for i, item in enumerate(chosen)]


def _example(index: int, answer: str, named: tuple[str, bool]) -> Example:
    name, is_call = named
    asks = _ASK_CALL if is_call else _ASK_NOUN
    return Example(name, asks[index % len(asks)].format(name=name), answer)


def _documented() -> Iterator[tuple[str, bool, str]]:
    """Yield (name, whether one calls it as a function, docstring) of all public names, in order."""
    for module_name in _MODULES.split():
        for name, member in _public(importlib.import_module(module_name)):
            if not (inspect.isclass(member) or inspect.isroutine(member)):
                continue
            if not _belongs(member, module_name):
                continue
            path = f"{module_name}.{name}".removeprefix("builtins.")
            if path in _REPLACED or name.endswith("hook"):  # hooks are there to be replaced
                continue
            if isinstance(member.__doc__, str):
                yield path, inspect.isroutine(member), member.__doc__
            if inspect.isclass(member):
                for attribute, value in _public(member):
                    is_call = inspect.isroutine(value) or isinstance(value, classmethod)
                    if not is_call and not isinstance(value, property):
                        continue
                    if not _belongs(value, module_name):
                        continue
                    if isinstance(value.__doc__, str):
                        yield f"{path}.{attribute}", is_call, value.__doc__


def _public(owner: object) -> list[tuple[str, object]]:
    # vars() and not getattr(): no descriptor runs, no module-level __getattr__ warns.
    return [(k, v) for k, v in sorted(vars(owner).items()) if not k.startswith("_")]


def _belongs(member: object, module_name: str) -> bool:
    """Whether ``member`` is documented by this module.

    Not if it was imported there from another one, nor if a package put it there: torch and
    transformers patch some, and the examples must not depend on what was imported before.
    """
    home = str(getattr(member, "__module__", None) or module_name).partition(".")[0]
    if home in _BACKING or home.lstrip("_") == module_name.partition(".")[0]:
        return True
    # What is written in C says "_io" for io; "_thread" and their like have no public namesake.
    return home in sys.stdlib_module_names and home.lstrip("_") not in sys.stdlib_module_names


def _trim(docstring: str) -> str:
    """The first sentence of a docstring, or "" where it is too short or too long to be one."""
    paragraph = re.split(r"\n\s*\n", inspect.cleandoc(docstring))[0]
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split()))[0]
    return sentence if _SHORTEST <= len(sentence) <= _LONGEST else ""
