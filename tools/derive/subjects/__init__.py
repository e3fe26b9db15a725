"""Tables and numbers of guides and reports, one module per subject.

A module has `TABLES`, `NUMBERS` or both. Each says by page and by name of a comment what makes the text there.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable


def joined(kind: str) -> dict[tuple[str, str], Callable[[], str]]:
    """Return the `TABLES` or the `NUMBERS` of all subjects."""
    places: dict[tuple[str, str], Callable[[], str]] = {}
    for module in pkgutil.iter_modules(__path__):
        of_subject = getattr(importlib.import_module(f"{__name__}.{module.name}"), kind, {})
        if repeated := places.keys() & of_subject.keys():
            raise ValueError(f"two subjects write {min(repeated)}")
        places |= of_subject
    return places
