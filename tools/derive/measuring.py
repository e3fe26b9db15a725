"""The modules of tools/measure that pages are derived from: only here does this folder import from another room.

A program in this folder is started as a plain script, so tools/measure is not among the folders that Python searches.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "measure"))

import doctor_observed  # doctor's findings about public files, and what the engines did with these files
import one_gpu  # the list of `make gpu`, whose times are predicted

__all__ = ["doctor_observed", "one_gpu"]
