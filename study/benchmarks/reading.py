"""How long does it take to read many records into one table?

    python -m study.benchmarks.reading [--records 1000] [--output FILE]

The records are made up, as long as real ones, with 40 steps each, and lie in a temporary folder as collected ones do.
They were just written, so that the time is that of reading and checking, not of a disk.
"""

from __future__ import annotations

import tempfile
import time
from itertools import islice, product
from pathlib import Path

from study import record
from study.benchmarks import pairs, synthetic
from study.compare import table
from study.config import Parser, Refusal

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
NUM_STEPS = 40


def main(words: list[str]) -> int:
    parser = Parser(prog="study.benchmarks.reading", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--records", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(words)
    if options.records < 1:
        raise Refusal(f"--records {options.records}: must be at least 1")
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        num_bytes = write(Path(folder), options.records)
        started = time.perf_counter()
        runs = table.read([Path(folder)])
        read = time.perf_counter()
        long = table.steps(runs)
        spread = time.perf_counter()
    result = {
        "records": len(runs),
        "steps": len(long),
        "bytes": num_bytes,
        "read_seconds": read - started,
        "steps_seconds": spread - read,
    }
    print("{records} records, {steps} steps: {read_seconds:.2f} s, all steps {steps_seconds:.2f} s".format(**result))
    if options.output:
        record.write_json(options.output, {**pairs.report("reading", options, {}), **result})
    return 0


def write(folder: Path, num_records: int) -> int:
    """Write so many runs, each with an outcome; return the bytes of their files."""
    seeds = range(-(-num_records // (2 * len(STRATEGIES))))
    for seed, box, strategy in islice(product(seeds, ("cpu", "gpu"), STRATEGIES), num_records):
        synthetic.write_run(folder / box, strategy=strategy, seed=seed, box=box, num_steps=NUM_STEPS, study="reading")
    return sum(path.stat().st_size for path in folder.rglob("*.json*"))


if __name__ == "__main__":
    pairs.end(main)
