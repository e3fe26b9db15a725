"""Run the code lines of one claim with the current engine, as one process on a CPU.

    python -m study.claims.snippet_process FOLDER

FOLDER contains rule.json, and each rank writes its answer there. The current folder belongs to the snippet and is empty
at first.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from zero_study import files
from zero_study.engines import extensions

SEED = 42
MICRO_BATCH_SIZE = 8
LENGTH = 8  # tokens of a review
REVIEWS = 160  # to train on; 20 batches
STEPS = 2
MESSAGE_LENGTH = 400

# Large enough for both thresholds: stage 3 shards only tensors of more than 1e5 elements, and offload to NVMe swaps
# only tensors of more than 1 MiB.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 1024,
}


def main(place: Path) -> None:
    """Run the code lines, evaluate the expressions of the rule, and write the results of this rank."""
    rule = json.loads((place / "rule.json").read_text())
    extensions.use_built()
    answer: dict[str, Any] = {}
    try:
        names = fixtures(rule["through"])
        (place / "started").touch()
        try:
            RUNNERS[rule["through"]](rule["snippet"], names)
        except BaseException as error:
            traceback.print_exc()
            answer["message"] = described(error)
        else:
            answer["found"] = {expression: value(expression, names) for expression in rule["wants"]}
            answer["measured"] = rule["measures"] and value(rule["measures"], names)
    except BaseException:
        answer = {"fault": traceback.format_exc()}  # an error of this project, not of the engine
    (place / f"answer-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # train.py ends in the same way, for the same reason


def fixtures(through: str) -> dict[str, Any]:
    """Return the names that published code lines may use, with their values.

    They include a tiny model, its tokenizer and data, libraries, and functions.
    """
    import datasets
    import torch
    import transformers

    from study.workloads import synthetic

    torch.set_num_threads(1)
    tokenizer = synthetic.tokenizer("bert-imdb")
    config = transformers.BertConfig(**SIZES, vocab_size=len(tokenizer), num_labels=2)  # type: ignore[call-arg]
    texts, labels = synthetic.reviews()
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(SEED)).tolist()
    tokens = tokenizer(
        [texts[i] for i in chosen[: REVIEWS + 16]], padding="max_length", truncation=True, max_length=LENGTH
    )
    reviews = datasets.Dataset.from_dict({**tokens, "labels": [labels[i] for i in chosen[: REVIEWS + 16]]})
    names = {
        "torch": torch,
        "Path": Path,
        "folder": str(Path.cwd()),
        "tokenizer": tokenizer,
        "config": config,
        "train_dataset": reviews.select(range(REVIEWS)),
        "eval_dataset": reviews.select(range(REVIEWS, REVIEWS + 16)),
        "written": lambda below: sum(f.stat().st_size for f in Path(below).rglob("*") if f.is_file()),
    }
    for name in ("AutoModelForSequenceClassification", "Trainer", "TrainingArguments"):
        names[name] = getattr(transformers, name)
    if through != "accelerate-yaml":  # there the model is built later, with the settings of the file
        with torch.random.fork_rng():  # leaves the random state of a snippet that sets no seed unchanged
            torch.manual_seed(SEED)
            names["model"] = names["AutoModelForSequenceClassification"].from_config(config)
    if through == "python" and "RANK" not in os.environ:  # with ranks, these would create the process group too early
        names["args"] = transformers.TrainingArguments(**on_cpu(), output_dir="out", max_steps=STEPS, report_to="none")
    return names


def on_cpu() -> dict[str, Any]:
    """Return the extra TrainingArguments that published code lines need to run without a GPU."""
    return {"use_cpu": True} | ({"ddp_backend": "gloo"} if "RANK" in os.environ else {})


def train_with_json(snippet: str, names: dict[str, Any]) -> None:
    """Train with the published lines as the whole configuration of deepspeed.initialize.

    DeepSpeed creates the optimizer only if the lines name one. Otherwise it gets an AdamW.
    """
    import deepspeed
    import torch

    settings = json.loads(snippet)
    deepspeed.init_distributed(dist_backend="gloo")
    model = names["model"]
    parameters = list(model.parameters())
    optimizer = None if "optimizer" in settings else torch.optim.AdamW(parameters)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, optimizer=optimizer, config=settings)
    watch(engine, engine.optimizer, names)
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        engine.backward(engine(**batch(names)).loss)
        engine.step()


def train_with_yaml(snippet: str, names: dict[str, Any]) -> None:
    """Train with the accelerate file that started this process, which contains the published lines."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = MICRO_BATCH_SIZE

    def built(zero3_init: bool) -> int:
        """Build a model with or without zero3_init, and return the bytes of its parameters that this rank stores."""
        with plugin.zero3_init_context_manager(enable=zero3_init):
            parameters = list(names["AutoModelForSequenceClassification"].from_config(names["config"]).parameters())
        return sum(getattr(p, "ds_tensor", p).nbytes for p in parameters)

    names["model"] = model = names["AutoModelForSequenceClassification"].from_config(names["config"])
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    names |= {"accelerator": accelerator, "built": built}
    watch(engine, optimizer.optimizer, names)
    names["micro_batches"] = STEPS * accelerator.gradient_accumulation_steps
    for _ in range(names["micro_batches"]):
        with accelerator.accumulate(engine):
            accelerator.backward(engine(**batch(names)).loss)
            optimizer.step()
            optimizer.zero_grad()


def train_with_arguments(snippet: str, names: dict[str, Any]) -> None:
    """Train with Trainer and the published TrainingArguments, to which the arguments for a CPU are added."""
    training_arguments = names["TrainingArguments"]
    names["TrainingArguments"] = lambda **arguments: training_arguments(**arguments, **on_cpu())
    names["args"] = eval(snippet, names)
    names["trainer"] = trainer = names["Trainer"](
        model=names["model"],
        args=names["args"],
        train_dataset=names["train_dataset"],
        eval_dataset=names["eval_dataset"],
    )
    trainer.train()
    if trainer.is_deepspeed_enabled:
        watch(trainer.model_wrapped, trainer.model_wrapped.optimizer, names)


def run_python(snippet: str, names: dict[str, Any]) -> None:
    exec(compile(snippet, "snippet", "exec"), names)


RUNNERS = {
    "deepspeed-json": train_with_json,
    "accelerate-yaml": train_with_yaml,
    "training-arguments": train_with_arguments,
    "python": run_python,
}


def batch(names: dict[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = names["train_dataset"].with_format("torch")[:MICRO_BATCH_SIZE]
    return rows


def watch(engine: Any, optimizer: Any, names: dict[str, Any]) -> None:
    """Make the names `engine`, `optimizer` and `held` available to the expressions that a rule evaluates.

    `held(part)` returns the bytes per parameter that this rank stores of a part of the model states.
    """
    from study.training.memory import model_state_bytes
    from zero_study.engines.readback.parameters import whole_size

    def held(part: str) -> float:
        sizes = map(whole_size, engine.parameters())
        return float(round(getattr(model_state_bytes(engine, optimizer, None), part) / sum(sizes), 1))

    names |= {"engine": engine, "optimizer": optimizer, "held": held}


def value(expression: str, names: dict[str, Any]) -> bool | float | str | None:
    result = eval(expression, names)
    if result is not None and not isinstance(result, (bool, int, float, str)):
        raise TypeError(f"{expression}: is a {type(result).__name__}; ask for a number, a word, yes or no")
    return result


def described(error: BaseException) -> str:
    """Return the type and the first line of an engine's error, without the folders of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:  # an assertion without a message: show the asserted expression
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = [f"{frame.line} ({Path(frame.filename).name})"]
    # The first line of pydantic's message says only how many errors there are.
    num_lines = 3 if type(error).__name__ == "ValidationError" else 1
    text = ": ".join([type(error).__name__, *lines[:num_lines]])
    return files.redact_paths(text.replace(sys.prefix, "(python)"))[:MESSAGE_LENGTH]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
