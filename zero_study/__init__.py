"""Provide the package `study` under a second name, `zero_study`, that other projects do not use.

    from zero_study import api, diff, prove, saved, testing
    python -m zero_study.prove train.py

A user's script may have a package of its own that is called `study`. The modules that are imported through this name
use only relative imports. They therefore never import the user's package by mistake. The planner has no such second
name: `api`, `advise` and `Request` are those of `study`.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers know no __path__: for them, diff.pyi and others stand in this folder
    from study import api as api
    from study import diff as diff
    from study import doctor as doctor
    from study import prove as prove
    from study import saved as saved
    from study import testing as testing
    from study import upgrade as upgrade
    from study.planner import Request as Request
    from study.planner import advise as advise

_STUDY = Path(__file__).resolve().parents[1] / "study"
_CHECKS = ("diff", "doctor", "prove", "saved", "testing", "upgrade")
_OF_STUDY = ("Request", "advise", "api")

__path__ = [str(_STUDY)]
__version__: str = import_module(f"{__name__}.version").__version__

if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import a part when it is used: some need torch."""
        if name in _CHECKS:
            return import_module(f"{__name__}.{name}")
        if name in _OF_STUDY:
            _require_own_study(name)
            return import_module("study.api") if name == "api" else getattr(import_module("study.planner"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require_own_study(name: str) -> None:
    """Raise ImportError if `study` is another package than the one beside this folder."""
    spec = find_spec("study")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != _STUDY:
        found = spec and spec.origin
        raise ImportError(
            f"zero_study.{name} needs the package study of this distribution, but Python finds {found} under that name."
            " Use the command `zero-study advise --json`, or import it in a folder without a package `study`."
        )
