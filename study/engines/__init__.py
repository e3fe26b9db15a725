"""Read from an installed engine which keys it knows, what it has built, and what it sends."""

import sys
import warnings
from importlib import import_module
from typing import Any

# These packages were in this one. The old names work for one more release.
_MOVED = {"conformance", "diff", "doctor", "prove", "saved", "upgrade"}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = __name__.partition(".")[0]
    warnings.warn(f"import {name} from zero_study, not from {__name__}", DeprecationWarning, stacklevel=2)
    module = import_module(f"{package}.{name}")
    globals()[name] = sys.modules[f"{__name__}.{name}"] = module
    return module
