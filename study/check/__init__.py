"""Check the configuration files, lock files and checkpoints of a project at once."""

from study.check.examine import Report as Report
from study.check.examine import examine as examine
from study.check.sarif import content as sarif
from study.check.text import answer as answer
from study.check.text import baseline as baseline
from study.check.text import markdown as markdown
from study.check.text import text as text

__all__ = ["Report", "answer", "baseline", "examine", "markdown", "sarif", "text"]
