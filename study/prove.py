"""`python -m zero_study.prove train.py`: the short name of `zero_study.engines.prove`, also for imports."""

import sys

if __name__ == "__main__":
    from .engines.prove.__main__ import main

    main()
else:
    from .engines import prove

    sys.modules[__name__] = prove  # one module under both names
