"""`zero-study why` explains exceptions that no rule names, by their kind, their values and their traceback."""

from __future__ import annotations

import json
import multiprocessing
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from zero_study.why import answer, known, log, sizes, text, tracebacks
from zero_study.why.cause import CERTAINTIES, Cause

GENERAL = [rule for rule in known.rules() if rule.general]


def cause_of(lines: str) -> Cause:
    cause = answer.answer_lines(lines.splitlines()).cause
    assert cause is not None
    return cause


def raised(function: Callable[[], object]) -> str:
    """Return what Python prints for the exception that a function raises."""
    try:
        function()
    except Exception as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("nothing was raised")


# ---------------------------------------------------------------- the rules


@pytest.mark.parametrize("rule", GENERAL, ids=lambda rule: rule.id)
def test_a_rule_explains_its_example(rule: known.Rule):
    cause = cause_of(rule.example)
    assert cause.id == rule.id
    values = [*re.compile(rule.match or "").groupindex, "where", "code", "library", "caller", "function", "message"]
    sentences = "\n".join((cause.happened, cause.because, *cause.changes, cause.check))
    assert not [name for name in values if f"{{{name}}}" in sentences]


def test_rules_say_what_to_change():
    assert all(rule.changes and rule.check and rule.documented for rule in GENERAL)


def test_a_rule_for_unknown_exceptions_never_comes_before_a_known_message():
    shape = next(rule for rule in GENERAL if rule.id == "start-up/shapes-differ").example
    known_message = "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float16"
    assert cause_of(f"{shape}\n\n{known_message}").id == "start-up/flatten-dtype"


# ---------------------------------------------------------------- real exceptions

REAL: dict[str, Callable[[], object]] = {
    "start-up/shapes-of-matrices": lambda: nn.Linear(3, 4)(torch.zeros(2, 5)),
    "start-up/shapes-differ": lambda: torch.zeros(3) + torch.zeros(4),
    "start-up/shape-not-possible": lambda: torch.zeros(7).view(2, 3),
    "start-up/partition-too-short": lambda: torch.zeros(1).narrow(0, 0, 5),
    "start-up/index-out-of-range": lambda: [][1],
    "start-up/dimensions-differ": lambda: torch.zeros(2).sum(dim=3),
    "start-up/types-differ": lambda: torch.zeros(2).index_put_((torch.tensor([0]),), torch.ones(1, dtype=torch.half)),
    "start-up/text-not-of-pattern": lambda: re.match("a", "b").group(),
    "start-up/value-is-none": lambda: None + 1,
    "start-up/hidden-by-wrapper": lambda: nn.DataParallel(nn.Linear(2, 2)).in_features,
    "start-up/arguments-of-own-function": lambda: raised(),
    "start-up/module-without-name": lambda: json.frob,
    "start-up/file-missing": lambda: Path("frob/no-file").read_text(),
    "start-up/damaged-input": lambda: json.loads("{"),
    "start-up/key-missing": lambda: {}["frob"],
    "start-up/check-failed": lambda: [None for each in [1] if _fails(each)],
    "start-up/child-of-worker": lambda: [multiprocessing.set_start_method("spawn") for _ in range(2)],
}


def _fails(value: int) -> None:
    assert value == 2


@pytest.mark.parametrize("id", REAL)
def test_a_real_exception_is_explained(id: str):
    cause = cause_of(raised(REAL[id]))
    assert cause.id == id
    assert "test_why_general.py" in cause.happened or id == "start-up/child-of-worker"


def test_both_shapes_are_in_the_answer():
    cause = cause_of(raised(REAL["start-up/shapes-of-matrices"]))
    assert "2x5" in cause.happened
    assert "5x4" in cause.happened or "3x4" in cause.happened


# ---------------------------------------------------------------- tracebacks

NESTED = """Traceback (most recent call last):
  File "/x/train.py", line 9, in main
    trainer.train()
  File "/env/lib/python3.11/site-packages/transformers/trainer.py", line 2, in train
    self.save_model(folder)
  File "/env/lib/python3.11/site-packages/safetensors/torch.py", line 3, in save_file
    serialize_file(tensors)
FrobError: no frob
"""


def test_a_traceback_says_who_called_which_library_and_what_it_did():
    (failure,) = log.read(NESTED.splitlines()).failures
    read = tracebacks.of(failure)
    assert (read.task, read.packages) == ("saving", ["safetensors", "transformers", ""])
    assert read.user is not None
    assert (read.user.function, read.user.code) == ("main", "trainer.train()")
    assert read.inner is not None
    assert (read.inner.function, read.inner.code) == ("save_file", "serialize_file(tensors)")


def test_an_unknown_exception_names_the_library_and_the_function():
    displayed = text.text(answer.answer_lines(NESTED.splitlines()))
    assert "save_file" in displayed
    assert "main" in displayed


@pytest.mark.parametrize(
    ("outer", "inner", "task"),
    [
        ("/x/llamafactory/launcher.py:launch", "/x/modeling.py:forward", "forward"),
        ("/env/site-packages/hydra/main.py:decorated_main", "/x/modeling.py:forward", "forward"),
        ("/env/site-packages/wandb/agents/pyagent.py:_run_job", "/x/modeling.py:forward", "forward"),
        ("/env/site-packages/torch/_dynamo/eval_frame.py:_fn", "/x/modeling.py:forward", "forward"),
        ("/x/train.py:main", "/env/site-packages/hydra/core/config.py:compose", "configuration"),
        ("/x/train.py:main", "/env/site-packages/wandb/sdk/wandb_run.py:log", "tracking"),
    ],
)
def test_what_a_program_was_doing_is_told_by_the_frames_that_matter(outer: str, inner: str, task: str):
    """Launchers and wrappers are the outer frames of every traceback, and say nothing."""
    files = [outer, *["/x/trainer.py:step"] * 8, inner]
    frames = [log.Frame(file.rpartition(":")[0], 1, file.rpartition(":")[2]) for file in files]
    assert tracebacks.read(frames).task == task


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("/env/lib/python3.11/site-packages/trl/trainer/utils.py", "trl"),
        ("/env/lib/python3.11/threading.py", "python"),
        ("/workspace/torchtitan/torchtitan/components/checkpoint.py", "torchtitan"),
        ("/home/user/train.py", ""),
    ],
)
def test_the_package_of_a_file_is_known(file: str, package: str):
    assert tracebacks.package_of(log.Frame(file, 1, "f")) == package


def test_an_older_notebook_shows_the_function_and_the_line_at_the_arrow():
    lines = """
/usr/local/lib/python3.10/dist-packages/bitsandbytes/functional.py in as_dict(self, packed)
    808                     "nested_quant_map": self.state2.code.clone(),
--> 810                     "nested_offset": self.offset.item(),
    811                 },

RuntimeError: frob"""
    (failure,) = log.read(lines.splitlines()).failures
    (frame,) = failure.frames
    assert (frame.function, frame.line, frame.code) == ("as_dict", 810, '"nested_offset": self.offset.item(),')


def test_a_rich_traceback_may_have_the_function_in_the_next_line():
    lines = """╭──────── Traceback (most recent call last) ────────╮
│ /env/lib/python3.11/site-packages/peft/layer.py:807 │
│ in forward                                          │
│    804 │   │   scaling = self.scaling[adapter]        │
│ ❱  807 │   │   result = result + lora_B(x)            │
│    808 │   │   return result                          │
╰─────────────────────────────────────────────────────╯
RuntimeError: frob"""
    (failure,) = log.read(lines.splitlines()).failures
    (frame,) = failure.frames
    assert (frame.function, frame.line, frame.code) == ("forward", 807, "result = result + lora_B(x)")


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (1x1536 and 768x3072)", ["2 times"]),
        ("mat1 and mat2 shapes cannot be multiplied (512x4096 and 1x4194304)", ["4 bits", "2,048"]),
        ("The size of tensor a (127) must match the size of tensor b (128)", ["by 1"]),
        (
            "The size of tensor a (18959) must match the size of tensor b (19471) at non-singleton dimension 0",
            ["512", "vocabulary"],
        ),
        ("The size of tensor a (0) must match the size of tensor b (5) at non-singleton dimension 0", ["ZeRO-3"]),
        ("Size mismatch between saved torch.Size([8, 4]) and current: torch.Size([16])", ["1/2", "FSDP"]),
        ("The size of tensor a (640) must match the size of tensor b (512) at non-singleton dimension 1", []),
        ("frob", []),
    ],
)
def test_the_relation_of_two_sizes_is_told(message: str, numbers: list[str]):
    relation = sizes.relation(message)
    assert all(number in relation for number in numbers)
    assert bool(relation) == bool(numbers)


def test_a_flat_piece_is_no_vocabulary():
    start = "RuntimeError: size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size("
    end = ") from checkpoint, the shape in current model is torch.Size([128256, 2048])."
    assert cause_of(f"{start}[65667584]{end}").id == "save/flat-piece"
    assert cause_of(f"{start}[128264, 2048]{end}").id == "save/vocabulary-size"


def test_classes_that_a_rule_names_are_of_libraries():
    """Classes of packages that are not installed here are listed."""
    elsewhere = {"AsyncLLM", "DataProto", "LLMEngine", "TensorDict", "SFTConfig", "DPOConfig", "GRPOConfig"}
    elsewhere |= {"PPOConfig", "RLOOConfig"}
    rule = next(rule for rule in GENERAL if rule.id == "start-up/attribute-of-known-class")
    names = re.search(r"\(\?P<class>([^)]*)\)", rule.match or "")
    assert names is not None
    packages = Path(torch.__file__).parents[1]
    files = [
        *(packages / "torch" / "distributed" / "fsdp").rglob("*.py"), packages / "torch" / "optim" / "lr_scheduler.py",
        *(packages / "accelerate").rglob("*.py"), *(packages / "peft").rglob("*.py"),
        *(packages / "transformers").glob("*.py"), *(packages / "transformers" / "utils").glob("*.py"),
        *(packages / "transformers" / "generation").glob("*.py"),
    ]  # fmt: skip
    code = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    defined = set(re.findall(r"^class (\w+)|^(\w+) = \w+$", code, re.MULTILINE))
    known_names = {name for pair in defined for name in pair if name}
    assert set(names[1].split("|")) - known_names <= elsewhere


def test_the_direct_cause_is_explained_and_not_what_follows():
    lines = (
        'Traceback (most recent call last):\n  File "/x/a.py", line 1, in f\n    x + y\n'
        "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/x/b.py", line 2, in g\n    f()\nFrobError: step failed'
    )
    assert cause_of(lines).id == "start-up/shapes-differ"


def test_the_exception_of_a_worker_process_is_explained():
    lines = (
        'Traceback (most recent call last):\n  File "/x/a.py", line 1, in f\n    next(loader)\n'
        "KeyError: Caught KeyError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/env/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 3, in _worker_loop\n'
        "    data = fetcher.fetch(index)\n"
        "KeyError: 'frob'"
    )
    cause = cause_of(lines)
    assert cause.id == "start-up/key-missing-in-data"
    assert "frob" in cause.happened


def test_a_traceback_that_a_report_moves_to_the_right_is_read():
    moved = "\n".join(f"    {line}" for line in NESTED.splitlines()).replace("FrobError", "ValueError")
    (failure,) = log.read(moved.splitlines()).failures
    assert (failure.kind, len(failure.frames)) == ("ValueError", 3)


def test_an_exception_that_python_ignores_is_not_the_first_failure():
    lines = [
        "Exception ignored in: <function Optimizer.__del__ at 0x77>",
        "Traceback (most recent call last):",
        '  File "/x/a.py", line 1, in __del__',
        "TypeError: 'NoneType' object is not callable",
        "FrobError: no frob",
    ]
    found = answer.answer_lines(lines)
    assert found.first_failure is not None
    assert found.first_failure.kind == "FrobError"


# ---------------------------------------------------------------- signs of trouble

STEPS = [f"{{'loss': {3 / step:.4f}, 'grad_norm': {1 + 1 / step:.4f}}}" for step in range(1, 30)]


@pytest.mark.parametrize(
    "sign",
    [
        ["torch.compile takes 46.30 s in total"],
        ["Recompiling function f in train.py:6"] * 3,
        ["Straggler detected at step 10"],
        [f"rank {rank}: step took {100 + 80 * (rank == 2)} ms" for rank in range(4)],
        [f"'trust_ratio': {0.0123}" for _ in range(10)],
        ["| step | norm |", *[f"| {n} | 1.4142135 |" for n in range(8)]],
    ],
)
def test_a_log_with_a_sign_of_trouble_is_not_called_sound(sign: list[str]):
    found = answer.answer_lines([*STEPS, *sign])
    assert not found.is_sound
    assert "Nothing wrong" not in text.text(found)
    assert answer.answer_lines(STEPS).is_sound


def test_a_compilation_before_many_steps_is_a_note():
    compiled = "Graph capturing finished in 21 secs"
    assert answer.answer_lines([compiled, *STEPS]).num_found == 0
    assert answer.answer_lines([compiled, *STEPS[:5]]).num_found == 1


def test_equal_columns_of_sound_tables_are_no_trouble():
    lines = ["| step | loss | ratio |", *[f"| {n} | {3 / (n + 1):.4f} | 1.0 |" for n in range(8)]]
    assert not answer.answer_lines([*STEPS, *lines]).num_found


# ---------------------------------------------------------------- how sure an answer is

_GUESS = re.compile(r"\b(?:usual\w*|often|probably|might|typical\w*|either|sometimes|perhaps)\b", re.IGNORECASE)
# Rules whose sentence has such a word, although their reason is what the message states.
STATED: set[str] = {
    "save/weights-only",
    "start-up/type-not-implemented",
}


def test_a_reason_that_is_a_guess_is_not_called_certain():
    for rule in known.rules():
        if (rule.reason or rule.certainty) == "certain" and rule.id not in STATED:
            assert not _GUESS.search(rule.because), rule.id


def test_a_reason_is_never_surer_than_what_happened():
    cause = Cause("a", "save", "", "", "possible", "", reason="certain")
    assert cause.sureness == "possible"
    assert Cause("a", "save", "", "", "certain", "", symptom="likely").sureness == "likely"
    assert all(
        CERTAINTIES.index(rule.reason or rule.certainty) >= CERTAINTIES.index(rule.certainty) for rule in GENERAL
    )


def test_the_answer_rates_what_happened_and_why_separately():
    content = cause_of("OSError: [Errno 28] No space left on device").content()
    assert content["certainty_of_what_happened"] == "certain"
    assert content["certainty_of_why"] == content["certainty"] != "certain"
    cut_off = cause_of(
        'Traceback (most recent call last):\n  File "/env/transformers/modeling_utils.py", line 3, in from_pretrained'
    )
    assert cut_off.content()["certainty_of_what_happened"] != "certain"
    displayed = text.text(answer.answer_lines(["OSError: [Errno 28] No space left on device"]))
    assert "The log states what happened" in displayed
