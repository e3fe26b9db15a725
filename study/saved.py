"""The short name of `zero_study.engines.saved`, for imports and for `python -m zero_study.saved FOLDER`."""

import sys

from .errors import exit_if_missing

with exit_if_missing(is_command=__name__ == "__main__"):
    if __name__ == "__main__":
        from .engines.saved.__main__ import main
    else:
        from .engines import saved

        sys.modules[__name__] = saved  # one module under both names

if __name__ == "__main__":
    main()
