"""Check whether a saved model or checkpoint holds what was trained.

from zero_study import saved

(adapter,) = saved.read(Path("adapter"))  # reads and checks; see adapter.findings
saved.compare(adapter, {"...lora_A.weight": tensor, ...}).different
"""

import sys

from ..errors import exit_if_missing

with exit_if_missing(is_command=sys.argv[:1] == ["-m"]):  # Python's word for itself while `python -m` imports this
    from .against import Comparison as Comparison
    from .against import compare as compare
    from .content import Finding as Finding
    from .content import Saved as Saved
    from .content import Tensor as Tensor
    from .folders import read as read
    from .recorded import compare_with_recording as compare_with_recording
