"""Is the launcher of machine 0 still there? Asked from another machine, whose own launcher would wait for ever.

torchrun's agent ends when its ranks do. A rank that is stopped, or in a call that never returns, does not; and that the
other machines have given the run up, nobody tells its agent.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from study.run import Run

ANSWER_SECONDS = 2.0
FIRST_WORD_SECONDS = 60.0  # for the ranks here, which know more of what has happened, to end by themselves


class MainMachine:
    """Machine 0, as another machine of a run sees it."""

    def __init__(self, run: Run) -> None:
        self._address = (run.main_process_ip, run.main_process_port) if run.machine_rank else None
        self._patience = run.config.collective_timeout + FIRST_WORD_SECONDS
        self._seen: float | None = None
        self.says: str | None = None  # why the run is ended; None: it is not

    def has_gone(self) -> bool:
        """Whether it was there, and has not answered since, for longer than ranks wait for one another."""
        if self._address is None:
            return False
        with suppress(OSError), socket.create_connection(self._address, timeout=ANSWER_SECONDS):
            self._seen = time.monotonic()
        if self._seen is None or time.monotonic() - self._seen < self._patience:
            return False
        self.says = f"machine 0 has not answered for {self._patience:.0f} s, and a rank of this machine does not end"
        return True
