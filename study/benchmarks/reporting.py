"""How long does a report of many records take, and how much memory?

    python -m study.benchmarks.reporting [--records 1000] [--output FILE]

The records are made up, and of two boxes: both workloads under every strategy on two and four processes, with as many
seeds as it takes. Memory is the resident set of this process and of the notebooks' kernels together, every 0.1 s.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import psutil

from study import record, report, strategy
from study.benchmarks import pairs, synthetic
from study.config import Parser, Refusal

WORLDS = (2, 4)
NUM_STEPS = 40
SAMPLE_SECONDS = 0.1


def main(words: list[str]) -> int:
    parser = Parser(prog="study.benchmarks.reporting", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--records", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(words)
    if options.records < 1:
        raise Refusal(f"--records {options.records}: must be at least 1")
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        boxes = [Path(folder) / "cpu", Path(folder) / "gpu"]
        write(Path(folder), options.records)
        started = time.perf_counter()
        with sampled() as peak_bytes:
            first = report.build("cpu", boxes, Path(folder) / "report")
        seconds = time.perf_counter() - started
        pages = {path.name: path.stat().st_size for path in sorted(first.parent.glob("*.html"))}
    result = {
        "records": options.records,
        "seconds": seconds,
        "peak_resident_bytes": max(peak_bytes),
        "page_bytes": pages,
    }
    print(f"{options.records} records: {seconds:.1f} s, {max(peak_bytes) / 2**20:.0f} MiB at most")
    if options.output:
        record.write_json(options.output, {**pairs.report("reporting", options, {}), **result})
    return 0


def write(folder: Path, num_records: int) -> None:
    """Write so many runs, each with an outcome, in one folder per box."""
    names = [name for name in strategy.names() if not name.startswith("fsdp2")]  # not of a CPU
    kinds = [(name, size) for name in names for size in ((1,) if name == "single" else WORLDS)]
    every = product(range(num_records), ("bert-imdb", "gpt-wikitext"), kinds, ("cpu", "gpu"))
    for seed, workload, (name, world_size), box in islice(every, num_records):
        synthetic.write_run(
            folder / box,
            workload=workload,
            strategy=name,
            world_size=world_size,
            seed=seed,
            box=box,
            num_steps=NUM_STEPS,
            study="cpu",
        )


@contextlib.contextmanager
def sampled() -> Iterator[list[int]]:
    """Yield a list that fills with the resident bytes of this process and all that it started."""
    seen = [0]
    ended = threading.Event()

    def sample() -> None:
        here = psutil.Process()
        while not ended.wait(SAMPLE_SECONDS):
            resident = 0
            for process in (here, *here.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    resident += process.memory_info().rss
            seen.append(resident)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    pairs.end(main)
