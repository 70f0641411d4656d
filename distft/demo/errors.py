"""The one error the demo raises itself; ``python -m distft.demo`` prints it without a traceback."""

from __future__ import annotations


class DemoError(RuntimeError):
    """Something the person at the keyboard can mend: a wrong option, a missing package."""
