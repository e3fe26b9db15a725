"""Check everything in a project that the other commands can check: configuration files, lock files, checkpoints."""

from .examine import Report as Report
from .examine import examine as examine
from .sarif import content as sarif
from .text import answer as answer
from .text import baseline as baseline
from .text import markdown as markdown
from .text import text as text

__all__ = ["Report", "answer", "baseline", "examine", "markdown", "sarif", "text"]
