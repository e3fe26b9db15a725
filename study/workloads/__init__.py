"""Define the workloads. Each is a module with the same functions for data, model, loss and metric.

`WORKLOADS` imports torch and transformers on first use, so that `sources.check` can be called without them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zero_study.errors import Refusal

if TYPE_CHECKING:
    import evaluate

WORKLOADS: dict[str, ModuleType]

METRICS = Path(__file__).resolve().parent / "metrics"


def __getattr__(name: str) -> Any:
    if name != "WORKLOADS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"bert-imdb": "bert_imdb", "gpt-wikitext": "gpt_wikitext"}
    globals()[name] = {workload: import_module(f"{__name__}.{module}") for workload, module in modules.items()}
    return globals()[name]


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Return one of this project's evaluation metrics, loaded from its file.

    This needs no network, and the metric keeps its values in memory. `evaluate` imports a copy of the file, which it
    writes to the cache folder of Hugging Face. Raises Refusal if that fails.
    """
    import evaluate

    try:
        return evaluate.load(str(METRICS / name), keep_in_memory=True)
    except OSError as error:
        raise Refusal(
            f"the library evaluate cannot load the metric {name} ({error}). The library writes to "
            "HF_HOME. Set HF_HOME to a folder that you can write to."
        ) from error
