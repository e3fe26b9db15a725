"""The page on the archive of public runs: where each source is, what it has, and the command that makes it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from public_sources.checkout import Repository
from study.public_runs import archive
from study.report.public_figures import MLPERF_FOOTNOTE
from zero_study.public_runs.schema import PublicRun
from zero_study.terminal import markdown

HEAD = ["source", "repository, commit", "license", "runs", "KiB", "GPUs", "what is logged"]
FIELDS = {  # what is logged -> the columns that have it
    "loss": ("loss",),
    "held-out loss": ("evaluation_loss",),
    "held-out accuracy": ("accuracy",),
    "time": ("seconds", "seconds_per_step", "samples_per_second", "tokens_per_second", "tokens_per_second_per_gpu"),
    "memory": (
        "allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes", "used_bytes",
        "peak_gpu_memory_bytes",
    ),
    "learning rate": ("learning_rate",),
    "gradient norm": ("gradient_norm",),
}  # fmt: skip
INTRODUCTION = """\
# Runs that others measured

Other people published logs of trainings on GPUs. The files in this folder have the facts and figures of these logs, \
one line of JSON per training. Nothing here was measured by this project. The notebook `gpus` compares these runs, and \
[planner-accuracy](../planner-accuracy.md) compares the planner's predictions with them.

Each run names its repository, commit, file, digest and license. What a log and the files beside it do not state is \
missing. A run whose log ends early is marked, and comparisons do not average it. Comparisons of pairs use the \
steps that both logs have, and say how many logs ended early. If a repository has no license, only \
numbers were taken, with their address.

`planner_benchmark.json` is another table, with one line per training: the settings, times and memory of these and \
other published trainings, [with which any planner can be scored](../planner-accuracy.md#score-another-planner). \
`other_planners.csv` has the scores of other tools."""
COMMANDS = """\
## Make a file again

Clone the repositories without their working trees. Then call `tools/collect/public_runs.py` with the source and with \
the clones, in the order of the table:

    git clone --no-checkout https://github.com/OWNER/NAME CLONE
    python tools/collect/public_runs.py SOURCE CLONE...

The same release of this project makes the same file again. These are the commands for all sources:
"""


def page(sources: Mapping[str, Sequence[Repository]]) -> str:
    """Return the page on the sources that are in the archive."""
    rows = [
        row for name, repositories in sources.items() if name in archive.sources() for row in _rows(name, repositories)
    ]
    clones = {name: [repository.name.rpartition("/")[2] for repository in listed] for name, listed in sources.items()}
    commands = [
        f"    python tools/collect/public_runs.py {name} {' '.join(folders)}" for name, folders in clones.items()
    ]
    table = markdown(HEAD, rows, len(HEAD))
    note = f"About the sources of MLPerf: {MLPERF_FOOTNOTE}"
    return "\n".join([INTRODUCTION, "", "## Sources", "", *table, "", note, "", COMMANDS, *commands, ""])


def _rows(name: str, repositories: Sequence[Repository]) -> Iterable[list[str]]:
    runs = archive.source(name)
    kib = (archive.ARCHIVE / f"{name}{archive.COLLECTED}").stat().st_size / 2**10
    for number, repository in enumerate(repositories):
        own = [run for run in runs if run.source.repository == repository.name]
        address = f"https://github.com/{repository.name}/tree/{own[0].source.commit}"
        yield [
            f"{name}" if not number else "",
            f"[{repository.name}, {repository.commit[:8]}]({address})",
            repository.license,
            f"{len(own):,}",
            f"{kib:,.0f}" if not number else "",
            _cards(own),
            _fields(own),
        ]


def _cards(runs: Iterable[PublicRun]) -> str:
    numbers: dict[str, set[int]] = {}
    for run in runs:
        numbers.setdefault(run.setting.gpu or "unknown", set()).add(run.setting.num_gpus or 0)
    return ", ".join(f"{_range(counts)} {card}" for card, counts in sorted(numbers.items()))


def _range(counts: set[int]) -> str:
    numbers = sorted(counts - {0})
    return "?" if not numbers else f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def _fields(runs: Sequence[PublicRun]) -> str:
    columns = {name for run in runs for series in (run.training, run.evaluation) if series for name in series.columns}
    totals = {name for run in runs for name in run.totals}
    per_step = [name for name, fields in FIELDS.items() if columns & {*fields}]
    in_all = [name for name, fields in FIELDS.items() if totals & {*fields} and name not in per_step]
    return ", ".join(per_step + [f"{name} (in all)" for name in in_all])
