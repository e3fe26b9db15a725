"""The short name of `zero_study.engines.diff`, for imports and for `python -m zero_study.diff --output a train.py`."""

import sys

from .errors import exit_if_missing

with exit_if_missing(is_command=__name__ == "__main__"):
    if __name__ == "__main__":
        from .engines.diff.__main__ import run_command
    else:
        from .engines import diff

        sys.modules[__name__] = diff  # one module under both names

if __name__ == "__main__":
    run_command()
