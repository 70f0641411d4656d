"""The public names and how they are called, as text: ``python -m tests.public_api`` renews it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distft

FILE = Path(__file__).with_name("public_api.txt")


def lines() -> list[str]:
    """Return a line for each public function, class and member, sorted."""
    found = []
    for name in sorted(distft.__all__):
        public = getattr(distft, name)
        if inspect.ismodule(public):
            found += [f"{name}.{inner}" for inner in sorted(public.__all__)]
        elif inspect.isclass(public):
            found.append(f"{name}{_signature(public)}")
            found += sorted(f"{name}.{member}" for member in _members(public))
        else:
            found.append(f"{name}{_signature(public)}")
    return found


def _members(public: type) -> Iterator[str]:
    for name in dir(public):
        owner = next((each for each in public.__mro__ if name in vars(each)), None)
        if name.startswith("_") or owner is None or not owner.__module__.startswith("distft"):
            continue
        member = inspect.getattr_static(public, name)
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        yield f"{name}{_signature(member)}" if inspect.isfunction(member) else name


def _signature(call: Any) -> str:
    """Return names and defaults: annotations may be written in other ways."""
    parameters = inspect.signature(call).parameters.values()
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(plain))


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
