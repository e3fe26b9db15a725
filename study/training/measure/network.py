"""How many bytes did a machine's interfaces carry while a run stepped? The kernel's own counters."""

from __future__ import annotations

import json
from collections.abc import Container

import psutil

from study.records import machine
from study.records.schema import Network

Counters = dict[str, tuple[int, int]]  # of an interface -> bytes sent and received


class Traffic:
    """Counts from the start of the first steady step to the start of the last: whole steps, with what is between them.

    An edge of a step would not do: a rank may have received all that it needs while its own bytes are still queued.
    """

    def __init__(self, first_step: int) -> None:
        self._from = first_step  # of this process
        self._first: tuple[int, Counters] | None = None
        self._last: tuple[int, Counters] | None = None

    def begin_step(self, number: int, nth: int) -> None:
        """Note that a step begins, the nth of this process."""
        if nth >= self._from:
            self._last = (number, _counters())
            self._first = self._first or self._last

    def network(self) -> Network | None:
        """What was carried; None: there was no whole step."""
        if self._first is None or self._last is None or self._first[0] == self._last[0]:
            return None
        (first_step, before), (last_step, after) = self._first, self._last
        there = [name for name in before if name in after]  # of containers they come and go
        carried = {name: [now - then for now, then in zip(after[name], before[name], strict=True)] for name in there}
        used = {name: both for name, both in carried.items() if any(both)}
        return Network(
            interfaces=sorted(used),
            rate_bits_per_second=_rate(used),
            num_steps=last_step - first_step,
            sent_bytes=sum(sent for sent, _ in used.values()),
            received_bytes=sum(received for _, received in used.values()),
        )


def _counters() -> Counters:
    """Bytes sent and received by each interface since the machine has it; the loopback is left out."""
    each = psutil.net_io_counters(pernic=True, nowrap=False)
    return {name: (count.bytes_sent, count.bytes_recv) for name, count in each.items() if name != "lo"}


def _rate(interfaces: Container[str]) -> int | None:
    """The least to which a bucket of tokens holds one of them, bits per second; None: to none, or it is not known."""
    try:
        shown = json.loads(machine.said("tc", "-j", "qdisc", "show") or "[]")
    except ValueError:
        return None
    rates = [each["options"]["rate"] for each in shown if each.get("kind") == "tbf" and each.get("dev") in interfaces]
    return 8 * min(rates) if rates else None
