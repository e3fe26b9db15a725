"""The notebook `releases`: which releases of a package train wrongly, and in which cases."""

from __future__ import annotations

import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from study.report import captions, plots, sentences, tables
from study.report.pages.shown import markdown
from zero_study import terminal
from zero_study.conformance import results
from zero_study.conformance.cells import NEWER_VARIATIONS
from zero_study.files import require_clone

PLAIN = {"1-rank", "2-ranks", "accumulation-1", "accumulation-2", "accumulation-3", "clipped"}
LATER = tuple(f"/{variation}" for variation in NEWER_VARIATIONS)  # endings of cases that were added later
TEST_MODEL = "Model with 3,520 parameters, fp32 and 16 bits, 2 processes on a CPU"


class Releases:
    """The conformance results of a package's releases, for the cases that all of them were tested with.

    Raises Refusal if this is not a clone.
    """

    def __init__(self, package: str) -> None:
        require_clone("The results of the releases, which this notebook shows,")
        self.package = package
        self.matrices = results.read(package)
        in_all = set.intersection(*(set(matrix["cells"]) for matrix in self.matrices.values()))
        self.common = {cell for cell in in_all if not cell.endswith(LATER)}
        verdicts = {
            name: [matrix["cells"][cell]["verdict"] for cell in self.common] for name, matrix in self.matrices.items()
        }
        counts = pd.DataFrame({name: pd.Series(values).value_counts() for name, values in verdicts.items()}).T
        self.counts = counts.reindex(columns=["same", "refused", "wrong", "crashed"]).fillna(0).astype(int)

    def answer(self) -> Markdown:
        """Return how many releases train wrongly or crash, and which cases fail in the newest one."""
        last = [*self.matrices.values()][-1]
        failing = [cell for cell in self.common if last["cells"][cell]["verdict"] in results.FAILED]
        text = f"{sentences.releases(self.package, self.counts, len(self.common))} {sentences.engines_of(failing)}"
        names = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        first, newest = self.counts.index[0], self.counts.index[-1]
        return markdown(
            text, f"**What was run.** Releases {first} to {newest}. The newest release was run with {names}."
        )

    def failures(self) -> Figure:
        """Return a bar chart of the number of failing cases in each release."""
        title = f"Cases that fail in each release of {self.package}"
        head = captions.Head(title, captions.MEASURED, TEST_MODEL)
        counts = tables.merged(self.counts[["wrong", "crashed"]])
        return plots.failing_cases(counts, len(self.common), self.package, head)

    def crashes(self) -> Markdown:
        """Return the error messages of the crashes that the figure shows."""
        messages: dict[str, list[str]] = {}
        for version, matrix in self.matrices.items():
            for cell in (matrix["cells"][name] for name in self.common):
                if cell["verdict"] == "crashed":
                    messages.setdefault(cell["message"].partition(". ")[0], []).append(version)
        return markdown(sentences.crashes(messages))

    def variations(self) -> pd.DataFrame:
        """Return a table of the failures in variations of the training, by variation and release.

        Variations without a failure are left out. The table is empty if nothing fails.
        """
        cells = {version: matrix["cells"] for version, matrix in self.matrices.items()}
        cells = {version: cases for version, cases in cells.items() if any(name.endswith(LATER) for name in cases)}
        shared = [name for name in set.intersection(*map(set, cells.values())) if name.endswith(LATER)] if cells else []
        rows: dict[str, dict[str, str]] = {}
        for version, cases in cells.items():
            rows[version] = {}
            for variation in NEWER_VARIATIONS:
                verdicts = [cases[name]["verdict"] for name in shared if name.endswith(f"/{variation}")]
                failures = [f"{verdicts.count(verdict)} {verdict}" for verdict in results.FAILED if verdict in verdicts]
                rows[version][variation.replace("_", " ")] = ", ".join(failures)
        table = pd.DataFrame(rows).T
        table = table.loc[:, (table != "").any()] if len(table) else table
        return tables.merged(table).T if table.size else table

    def newest(self) -> pd.DataFrame:
        """Return a table of the failures of the newest release by engine and variation. Empty if nothing fails."""
        matrix = results.newest() if self.package == "deepspeed" else [*self.matrices.values()][-1]
        rows = []
        for name, cell in matrix["cells"].items():
            if cell["verdict"] in results.FAILED:
                engine, _, *settings = name.split("/")
                variation = ", ".join(part.replace("_", " ") for part in settings if part not in PLAIN) or "none"
                text = results.explanation(cell).partition(" (")[0][:120]
                rows.append((engine, variation, cell["verdict"], text))
        failures = pd.DataFrame(rows, columns=["engine", "variation", "result", "explanation"])
        groups = failures.groupby(["engine", "variation", "result"], sort=False)["explanation"]
        table = groups.agg(["size", "first"]).reset_index()
        return table.rename(columns={"size": "number of cases", "first": "how the first case fails"})


def known_faults() -> Markdown:
    """Return the table of the known faults of DeepSpeed."""
    rows = []
    for fault in results.faults():
        threads = ", ".join(f"[{link.rpartition('/')[2]}]({link})" for link in fault.threads)
        conditions = [", ".join(fault.precisions)]
        conditions += ["several micro batches"] if fault.several_micro_batches else []
        conditions += [fault.models] if fault.models else []
        releases = f"{fault.introduced or 'the first examined release'} to {fault.last}"
        rows.append((releases, fault.what, ", ".join(fault.engines), "; ".join(conditions), threads))
    head = ["releases", "what is wrong", "strategies", "only with", "bug reports"]
    return markdown("\n".join(terminal.markdown(head, rows)).replace("---:", "---"))
