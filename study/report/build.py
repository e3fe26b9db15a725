"""Execute notebooks with papermill, in a kernel of this Python, and write them with their outputs."""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import papermill
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_event_loop
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from study.claims import ledger
from study.records import find as records
from study.records.schema import Record
from study.running import studies
from zero_study.errors import Refusal
from zero_study.files import ROOT

NOTEBOOKS = ROOT / "notebooks"
# The notebooks that suit any study. `report` prints the path of the first.
OF_RUNS = ("answer", "learned", "memory", "time", "processes")
OF_AN_ARTICLE = "article"
OF_SEVERAL_PROCESSES = "processes"  # of OF_RUNS, the one that needs runs with more than one process
OF_GPUS = "a100-or-h100"  # measured runs on GPUs replace predictions in it
CELL_TIMEOUT_SECONDS = 600
STYLED = re.compile(r"\bT_[0-9a-f]{5}")  # the random id that pandas gives to a styled table
ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")  # the address in the repr of an object


def build(study: str, folders: Sequence[Path], output: Path) -> Path:
    """Execute the notebooks for the runs in these folders, and return the path of the first notebook.

    The notebook about the number of processes is left out if every run had one process. If a run was on a GPU, the
    notebook that compares machines is executed too, with these runs instead of predictions.

    The executed notebooks are written to `output`, and the first figure of the first one is also written as PNG. Raises
    Refusal if a notebook rejects its parameters or `output` is not a folder, and RuntimeError if a cell fails.
    """
    parameters: dict[str, Any] = {"records": [str(folder) for folder in folders]}
    parameters["control"] = studies.find(study).control
    recorded = _recorded(folders)
    has_several = not recorded or any(record.world_size > 1 for record in recorded)
    notebooks = {name: (name, parameters) for name in OF_RUNS if has_several or name != OF_SEVERAL_PROCESSES}
    if any(record.device == "cuda" for record in recorded):
        notebooks[OF_GPUS] = (OF_GPUS, {"records": parameters["records"]})
    _make(notebooks, output)
    first = output / f"{OF_RUNS[0]}.ipynb"
    cells = json.loads(first.read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    if figures := ["".join(data["image/png"]) for data in outputs if "image/png" in data]:
        first.with_suffix(".png").write_bytes(base64.b64decode(figures[0]))
    return first


def _recorded(folders: Sequence[Path]) -> list[Record]:
    """Return the records in these folders. The list is empty if they cannot be read, which the notebooks explain."""
    with suppress(Refusal):
        return [run.record.record for run in records.find_runs(folders) if run.record]
    return []


def build_all(output: Path) -> Path:
    """Execute all committed notebooks, write them to `output`, and return `output`.

    The notebook about articles is executed once per article.
    """
    parameters: dict[str, tuple[str, dict[str, Any]]] = {
        path.stem: (path.stem, {}) for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path.stem != OF_AN_ARTICLE
    }
    titles = {article.source: article.title for article in ledger.read() if article.sentences}
    parameters |= {source: (OF_AN_ARTICLE, {"source": source}) for source in titles}
    _make(parameters, output)
    for source, title in titles.items():
        path = output / f"{source}.ipynb"
        path.write_text(with_title(path.read_text(encoding="utf-8"), title), encoding="utf-8")
    return output


def with_title(article: str, title: str) -> str:
    """Return the text of a notebook about an article with the article's title as its first heading."""
    return article.replace("# Verdicts on an article", f"# {json.dumps(title, ensure_ascii=False)[1:-1]}", 1)


def _make(notebooks: Mapping[str, tuple[str, Mapping[str, Any]]], output: Path) -> None:
    """Execute notebooks and write them to `output`.

    `notebooks` maps each name in `output` to the name of a committed notebook and its parameters. Existing files are
    replaced only after all notebooks were executed. Other files are not changed. Raises Refusal if a notebook rejects
    its parameters. Raises RuntimeError if a cell fails, and keeps the partly executed notebook in `output`.
    """
    if output.exists() and not output.is_dir():
        raise Refusal(f"--output {output}: this is not a folder. Use another one.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch,
        ThreadPoolExecutor(max_workers=os.cpu_count()) as pool,
    ):
        # Each notebook has a kernel of its own, which is a process.
        ended = {
            name: pool.submit(_execute_and_tidy, notebook, Path(scratch, f"{name}.ipynb"), parameters)
            for name, (notebook, parameters) in notebooks.items()
        }
        try:
            for name, execution in ended.items():
                print(f"{output / name}.ipynb: {execution.result():.0f} s", flush=True)
        except RuntimeError as error:
            output.mkdir(exist_ok=True)
            failed = output / f"{name}.failed.ipynb"
            os.replace(Path(scratch, f"{name}.ipynb"), failed)
            raise RuntimeError(f"{error}; the executed notebook is {failed}") from None
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure or Ctrl-C, no further notebook is started
        output.mkdir(exist_ok=True)
        for name in notebooks:
            os.replace(Path(scratch, f"{name}.ipynb"), output / f"{name}.ipynb")
            (output / f"{name}.failed.ipynb").unlink(missing_ok=True)


def _execute_and_tidy(notebook: str, target: Path, parameters: Mapping[str, Any]) -> float:
    """Execute a committed notebook, make the result the same each time, and return the seconds that this took."""
    started = time.monotonic()
    with closing(ensure_event_loop()):  # of this thread, which Jupyter would leave open
        execute(NOTEBOOKS / f"{notebook}.ipynb", target, parameters)
    _tidy(target)
    return time.monotonic() - started


def execute(notebook: Path, target: Path, parameters: Mapping[str, Any]) -> None:
    """Execute a notebook with these parameters, and write it to `target` with its outputs.

    The kernel is the running Python. Raises Refusal if the notebook does not declare a parameter or if a cell raises
    Refusal. Raises RuntimeError if a cell fails in another way. `target` is written also if a cell fails.
    """
    declared = papermill.inspect_notebook(notebook)
    if unknown := sorted(set(parameters) - set(declared)):
        raise Refusal(
            f"{notebook.name}: the parameters {', '.join(unknown)} are unknown. Its cell with the tag "
            "`parameters` declares "
            f"{', '.join(declared) or 'none'}"
        )
    with tempfile.TemporaryDirectory(prefix="zero-study-") as private:

        class OwnKernel(AsyncKernelManager):
            """A kernel manager that starts the running Python, not a registered kernel, and leaves no file behind."""

            transport = "ipc"
            connection_file = str(Path(private) / "kernel.json")

            def _kernel_spec_manager_default(self) -> KernelSpecManager:
                return KernelSpecManager(kernel_dirs=[])

        try:
            papermill.execute_notebook(
                notebook,
                target,
                dict(parameters),
                kernel_name="python3",
                progress_bar=False,
                kernel_manager_class=OwnKernel,
                # Without the user's start-up files. The kernel logs its own shutdown as an error, hence the log level.
                extra_arguments=[f"--ipython-dir={private}", "--log-level=CRITICAL"],
                execution_timeout=CELL_TIMEOUT_SECONDS,
            )
        except PapermillExecutionError as error:
            if error.ename == "Refusal":
                raise Refusal(error.evalue) from None
            first = next(iter(error.evalue.splitlines()), "")
            raise RuntimeError(f"{notebook.name}, cell {error.cell_index}: {error.ename}: {first}") from None
        except (CellTimeoutError, DeadKernelError) as error:
            first = next(iter(str(error).splitlines()), "")
            raise RuntimeError(f"{notebook.name}: {type(error).__name__}: {first}") from None


def _tidy(executed: Path) -> None:
    """Remove everything that differs between two executions, and the set-up cell, which is only for Colab."""
    notebook = json.loads(executed.read_text(encoding="utf-8"))
    notebook["cells"] = [cell for cell in notebook["cells"] if "colab" not in cell["metadata"].get("tags", [])]
    notebook["metadata"] = {"kernelspec": notebook["metadata"]["kernelspec"], "language_info": {"name": "python"}}
    for cell in notebook["cells"]:
        if "injected-parameters" in cell["metadata"].get("tags", []):
            cell["id"] = "given"
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key == "tags"}
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    names: dict[str, str] = {}
    for match in STYLED.findall(text):
        names.setdefault(match, f"T_{len(names):05d}")
    text = STYLED.sub(lambda match: names[match[0]], ADDRESS.sub("", text))
    executed.write_text(text + "\n", encoding="utf-8")
