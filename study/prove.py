"""The short name of `zero_study.engines.prove`, for imports and for `python -m zero_study.prove train.py`."""

import sys

from .errors import exit_if_missing

with exit_if_missing(is_command=__name__ == "__main__"):
    if __name__ == "__main__":
        from .engines.prove.__main__ import main
    else:
        from .engines import prove

        sys.modules[__name__] = prove  # one module under both names

if __name__ == "__main__":
    main()
