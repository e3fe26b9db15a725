"""`python -m zero_study.diff --output a train.py`: the short name of `zero_study.engines.diff`, also for imports."""

import sys

if __name__ == "__main__":
    from .engines.diff.__main__ import main

    main()
else:
    from .engines import diff

    sys.modules[__name__] = diff  # one module under both names
