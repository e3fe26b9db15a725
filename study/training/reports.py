"""What do the ranks say of their ends? Each in a file on its machine and, where there are several, in their store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from study import files
from study.run import Run

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

WAIT_SECONDS = 5.0  # for which the ranks that came to a collective wait for one another's word of it
ANSWER_SECONDS = 2.0  # that the store has to answer in: it may be behind the link that is cut


class Reports:
    """The reports of a run's ranks, by rank. Nothing here waits long for another machine."""

    def __init__(self, run: Run, store: Store | None = None) -> None:
        self._run = run
        self._store = store

    def post(self, rank: int, report: dict[str, Any]) -> None:
        """Tell this machine and the others. Raises OSError where the folder takes nothing more."""
        if (store := self._store) is not None:
            _in_time(lambda: store.set(f"failure/{rank}", json.dumps(report)))
        files.write_json(self._run.own_folder / f"failure-rank{rank}.json", report)

    def read(self) -> dict[int, dict[str, Any]]:
        """Those that are there by now."""
        found = {}
        for rank in range(self._run.world_size):
            with suppress(OSError):
                found[rank] = json.loads((self._run.own_folder / f"failure-rank{rank}.json").read_text())
        return found | (_in_time(self._of_store) or {})

    def missing(self) -> list[int]:
        """Wait a little for the ranks that came to a collective; return those of which there is no word."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            there = self.read()
            missing = [rank for rank in range(self._run.world_size) if rank not in there]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.1)

    def remove(self) -> None:
        """Remove the files, once a record says what they say."""
        for path in self._run.own_folder.glob("failure-rank*.json"):
            path.unlink()

    def _of_store(self) -> dict[int, dict[str, Any]]:
        if self._store is None:
            return {}
        keys = {rank: f"failure/{rank}" for rank in range(self._run.world_size)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}


def _in_time(ask: Callable[[], Any]) -> Any:
    """What is answered, None where that takes too long or fails; the thread that waits on is left behind."""
    answer: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):  # torch's, of a store that is gone
            answer.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answer[0] if answer else None
