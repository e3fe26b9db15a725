"""The short name of `zero_study.engines.diff`, for imports and for `python -m zero_study.diff --output a train.py`."""

import sys

from .errors import describe_missing

try:
    if __name__ == "__main__":
        from .engines.diff.__main__ import main
    else:
        from .engines import diff

        sys.modules[__name__] = diff  # one module under both names
except ModuleNotFoundError as missing:
    message = describe_missing(missing) if __name__ == "__main__" else None
    if message is None:
        raise
    print(f"zero-study: {message}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    main()
