"""Recognize known faults of libraries by the signature of an exception and by the release of the library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zero_study.logs.printed_failures import Failure, Log
from zero_study.upgrade import faults
from zero_study.upgrade.faults import Fault
from zero_study.why.fact import Fact

ID = "start-up/known-fault"


def facts(log: Log, releases: Mapping[str, str]) -> Iterator[tuple[Fault, Fact]]:
    """Yield the known faults whose signature a failure has, unless the stated release does not have the fault."""
    for fault in faults.read():
        failure = next((each for each in log.failures if _has_signature(each, fault.signature)), None)
        is_stated = fault.package in releases
        if failure is None or (is_stated and not fault.is_among(releases)):
            continue
        if not is_stated and not fault.signature["function"]:
            continue  # other causes may have the same message
        first, end = fault.introduced, fault.fixed
        span = f"from {first}" if first else "any release"
        span += f" and before {end}" if end else ", without a release that fixes it"
        summary = (fault.summary or fault.what).rstrip(".")
        yield fault, Fact(
            ID, "start-up", f"The message and its traceback are those of a known fault of {fault.package}: {summary}.",
            f"{fault.package} {releases[fault.package]} has this fault ({span})." if is_stated else "",
            "stated", "the list of known faults", (failure.evidence,),
            (f'pip install "{fault.package}>={end}"',) if end and is_stated else (),
            "" if is_stated else f"pip show {fault.package} (releases with the fault: {span})",
            fault.threads[0],
        )  # fmt: skip


def _has_signature(failure: Failure, signature: Mapping[str, str]) -> bool:
    if not signature or (signature["exception"] and signature["exception"] != failure.kind):
        return False
    if re.search(signature["text"], failure.text) is None:
        return False
    function = signature["function"]
    return not function or any(re.search(function, str(frame)) for frame in failure.frames)
