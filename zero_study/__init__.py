"""Predict and check trainings with DDP, DeepSpeed ZeRO and FSDP2.

from zero_study import api, diff, prove, saved, testing
python -m zero_study.prove train.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import api as api
    from . import diff as diff
    from . import doctor as doctor
    from . import prove as prove
    from . import saved as saved
    from . import testing as testing
    from . import upgrade as upgrade
    from .planner import Request as Request
    from .planner import advise as advise

_MODULES = ("api", "diff", "doctor", "prove", "saved", "testing", "upgrade")
_OF_PLANNER = ("Request", "advise")

if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import a part when it is used, because some parts need torch."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name in _OF_PLANNER:
            return getattr(import_module(f"{__name__}.planner"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
