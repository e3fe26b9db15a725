"""Check the configuration files, lock files and checkpoints of a project at once."""

from zero_study.check.examine import Report as Report
from zero_study.check.examine import examine as examine
from zero_study.check.sarif import content as sarif
from zero_study.check.text import answer as answer
from zero_study.check.text import baseline as baseline
from zero_study.check.text import markdown as markdown
from zero_study.check.text import text as text

__all__ = ["Report", "answer", "baseline", "examine", "markdown", "sarif", "text"]
