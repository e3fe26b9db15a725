"""Run `python -m study.exact`, the former name of `zero-study conformance --exact`.

It will be removed in the next release.
"""

from __future__ import annotations

import os
import sys

from study import terminal

if __name__ == "__main__":
    terminal.print_error("`python -m study.exact` is now `zero-study conformance --exact`.")
    os.execv(sys.executable, [sys.executable, "-m", "study", "conformance", "--exact", *sys.argv[1:]])
