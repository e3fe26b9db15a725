"""Provide the package `study` under a second name, `zero_study`, that other projects do not use.

    from zero_study import diff, prove, saved, testing
    python -m zero_study.prove train.py

A user's script may have a package of its own that is called `study`. The modules that are imported through this name
use only relative imports. They therefore never import the user's package by mistake.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__path__ = [str(Path(__file__).with_name("study"))]
__version__: str = import_module(f"{__name__}.version").__version__


def __getattr__(name: str) -> Any:
    if name in ("diff", "prove", "saved", "testing"):  # imported when used: the first three need torch
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
