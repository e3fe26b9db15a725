"""Records of runs that never took place, for tests; the benchmarks make them too, and may not import from here."""

from __future__ import annotations

from study.benchmarks.synthetic import GPU, NUM_PARAMS, write_outcome, write_run

__all__ = ["GPU", "NUM_PARAMS", "write_outcome", "write_run"]
