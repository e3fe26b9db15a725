"""Strict execution of a notebook, in a kernel of this Python, and what of it a page shows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from study.errors import Refusal
from study.report import markup

CELL_TIMEOUT_SECONDS = 600

# Cells that are for a notebook and not for a page: the badge, the set-up, and what papermill was given.
NOT_SHOWN = {"colab", "parameters", "injected-parameters"}


def execute(notebook: Path, target: Path, parameters: Mapping[str, Any]) -> None:
    """Execute a notebook with these parameters in a kernel of this Python; write it to `target`, executed.

    Raises Refusal for a parameter that the notebook does not declare and for what a cell refuses; RuntimeError where a
    cell fails otherwise. `target` is then written too.
    """
    import papermill
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    declared = papermill.inspect_notebook(notebook)
    if unknown := sorted(set(parameters) - set(declared)):
        raise Refusal(
            f"{notebook.name}: no parameter is named {', '.join(unknown)}; its cell tagged `parameters` declares "
            f"{', '.join(declared) or 'none'}"
        )
    with tempfile.TemporaryDirectory(prefix="zero-study-") as private:

        class OwnKernel(AsyncKernelManager):
            """Starts the Python that runs this, whatever kernel the user has registered, and leaves no file behind."""

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
                # The user's start-up files are no part of a report; that it is asked to end is no error to the kernel.
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


def shown(executed: Path) -> tuple[str, str]:
    """What a page shows of an executed notebook: its text and outputs, as HTML, and its code."""
    import nbformat

    read: Callable[..., Any] = nbformat.read
    tagged = [(cell, cell.metadata.get("tags", [])) for cell in read(executed, as_version=4).cells]
    cells = [cell for cell, tags in tagged if not NOT_SHOWN.intersection(tags)]
    body = "\n".join(part for cell in cells for part in _shown_cell(cell))
    return body, "\n\n".join(cell.source for cell in cells if cell.cell_type == "code")


def _shown_cell(cell: Any) -> list[str]:
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark").enable("table")
    if cell.cell_type == "markdown":
        return [markdown.render(cell.source)]
    parts = []
    for output in cell.get("outputs", []):
        content = output.get("data", {})
        if "text/html" in content:
            parts.append(content["text/html"])
        elif "text/markdown" in content:
            parts.append(markdown.render(content["text/markdown"]))
        else:
            parts.append(markup.code_block(output.get("text", content.get("text/plain", ""))))
    return parts
