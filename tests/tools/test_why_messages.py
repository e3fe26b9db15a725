"""Rules of `zero-study why`: each finds its own message, and the messages are those that packages really print."""

from __future__ import annotations

import importlib.metadata
import mmap
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import why_errors
from torch.distributed.checkpoint.api import CheckpointException

from zero_study.why import answer, known

KINDS = ("start-up", "save", "launch")
MESSAGES = [rule for rule in known.rules() if not rule.is_conclusion]
# The rules for unknown exceptions are in tests/tools/test_why_general.py.
OWN = [rule for rule in MESSAGES if rule.kind in KINDS and not rule.general]
PACKAGES = Path(torch.__file__).parents[1]

# Messages that need a GPU, several ranks or a whole training: the installed file that has a part of the message.
SOURCES = {
    "start-up/fsdp-module-on-cpu": (
        "torch/distributed/fsdp/_runtime_utils.py",
        "An FSDP-managed module unexpectedly has parameters on ",
    ),
    "launch/device-ordinal": (
        "torch/distributed/elastic/agent/server/local_elastic_agent.py",
        "exceeds available GPUs",
    ),
    "launch/deepspeed-no-gpu": ("deepspeed/launcher/runner.py", "Unable to proceed, no GPU resources available"),
    "launch/ssh": ("deepspeed/launcher/runner.py", "was not reachable via ssh"),
    "launch/no-ssh-rank": ("deepspeed/launcher/runner.py", "without ssh, but --node_rank is not set correctly"),
    "launch/master-address": (
        "deepspeed/launcher/runner.py",
        "Unable to detect suitable master address via `hostname -I`",
    ),
    "save/zero3-16bit": (
        "accelerate/accelerator.py",
        "Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save`",
    ),
    "save/zero3-not-saved": (
        "deepspeed/runtime/engine.py",
        "because stage3_gather_16bit_weights_on_model_save is False",
    ),
    "save/meta": ("accelerate/accelerator.py", "You can't save the model since some parameters are on the meta device"),
    "save/quantized": ("transformers/modeling_utils.py", " and is not serializable"),
    "save/tag-not-consistent": ("deepspeed/runtime/engine.py", "' is not consistent across"),
    "save/zero-world-size": ("deepspeed/runtime/engine.py", "The checkpoint being loaded used a DP "),
    "start-up/fsdp2-optimizer": (
        "accelerate/accelerator.py",
        "When using FSDP2, a model and optimizer must be passed together",
    ),
    "start-up/fsdp2-tied": ("accelerate/accelerator.py", "FSDP2 mapping failed (missing: "),
    "start-up/fsdp-and-deepspeed": (
        "transformers/trainer.py",
        "Using --fsdp xxx together with --deepspeed is not possible",
    ),
    "start-up/fsdp-optimizer-of-own": (
        "transformers/trainer.py",
        "Passing `optimizers` is not allowed if PyTorch FSDP is enabled",
    ),
    "start-up/device-map-distributed": (
        "accelerate/accelerator.py",
        "You can't train a model that has been loaded with `device_map='auto'`",
    ),
    "start-up/deepspeed-ignored-keys": (
        "accelerate/utils/dataclasses.py",
        "accelerate config variables will be ignored:",
    ),
    "start-up/optimizer-twice": (
        "accelerate/accelerator.py",
        "You cannot specify an optimizer in the config file and in the code at the same time",
    ),
    "start-up/deepspeed-missing": ("accelerate/commands/launch.py", "DeepSpeed is not installed => run"),
    "start-up/dispatch-batches": (
        "accelerate/data_loader.py",
        "You can't use batches of different size with `dispatch_batches=True`",
    ),
    "start-up/different-devices": ("torch/lib/libtorch_cpu.so", "Expected all tensors to be on the same device, but "),
    "start-up/gpu-too-new": ("torch/cuda/__init__.py", "is not compatible with the current PyTorch installation"),
    "start-up/compiler-version": ("torch/utils/cpp_extension.py", "maximum required version by CUDA"),
    "save/adapter-rank": ("torch/nn/modules/module.py", "size mismatch for "),
    "save/vocabulary-size": ("torch/nn/modules/module.py", "size mismatch for "),
    "save/write-cut-off": ("torch/serialization.py", "def save("),
    "start-up/unscale-cut-off": ("torch/amp/grad_scaler.py", "Attempting to unscale FP16 gradients"),
    "start-up/dtensor-operator": (
        "torch/distributed/tensor/_sharding_prop.py",
        "does not have a sharding strategy registered",
    ),
    "start-up/fsdp-compute-device": ("torch/distributed/fsdp/_init_utils.py", "Inconsistent compute device and"),
    "start-up/fsdp-uniform-dtype": (
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
        "uniform original parameter dtype",
    ),
    "start-up/loader-timeout": ("torch/utils/data/dataloader.py", "DataLoader timed out after"),
    "start-up/no-chat-template": (
        "transformers/tokenization_utils_base.py",
        "chat template functions because tokenizer.chat_template is not set",
    ),
    "start-up/no-samples": ("torch/utils/data/sampler.py", "num_samples should be a positive integer"),
    "start-up/tokenizer-class": ("transformers/models/auto/tokenization_auto.py", "Tokenizer class"),
    "start-up/unknown-split": ("datasets/arrow_reader.py", "Unknown split"),
    "start-up/zero3-embedding": ("torch/nn/functional.py", "Padding_idx must be within num_embeddings"),
    "start-up/zero3-order": ("deepspeed/runtime/zero/partitioned_param_coordinator.py", "tracing error at step"),
    "start-up/zero-reduced-twice": (
        "deepspeed/runtime/zero/stage_1_and_2.py",
        "Gradient computed twice for this partition",
    ),
    "launch/no-gpu-cut-off": ("torch/cuda/__init__.py", "def _lazy_init"),
    "start-up/extension-cut-off": ("torch/utils/cpp_extension.py", "def _jit_compile"),
    "start-up/hub-cut-off": ("transformers/utils/hub.py", "def cached_files"),
    "start-up/collator-shapes": ("torch/lib/libtorch_cpu.so", "stack expects each tensor to be equal size"),
    "start-up/hub-limit": ("huggingface_hub/utils/_http.py", "Too Many Requests"),
    "start-up/micro-batch-zero": ("deepspeed/runtime/config.py", " has to be greater than 0"),
    "start-up/leaf-in-place": ("torch/lib/libtorch_cpu.so", "leaf Variable that requires grad"),
    "start-up/scheduler-without-rate": ("torch/optim/lr_scheduler.py", "is not specified in param_groups"),
    "start-up/loss-not-scalar": (
        "torch/autograd/__init__.py",
        "grad can be implicitly created only for scalar outputs",
    ),
    "start-up/storage-not-resizable": ("torch/lib/libtorch_cpu.so", "Trying to resize storage that is not resizable"),
    "launch/data-worker-aborted": ("torch/lib/libtorch_python.so", " is killed by signal: "),
    "start-up/no-compiler": ("torch/_inductor/exc.py", "No working C++ compiler found"),
}

# Messages that no installed package has, and who prints them.
ELSEWHERE = {
    "save/shared-tensors-of-model": "transformers 4; a public log has it",
    "start-up/nccl-limit": "NCCL on a GPU; a public log has it",
    "launch/driver-too-old": "PyTorch's build for CUDA",
    "launch/slurm-time-limit": "Slurm",
    "launch/slurm-ended": "Slurm",
    "launch/slurm-request": "Slurm",
    "start-up/generations-divide": "TRL; a public log has it",
    "start-up/unscale-bf16": "PyTorch's build for CUDA",
    "start-up/flash-attention-type": "flash-attn",
    "start-up/wandb-key": "wandb",
    "start-up/gpu-unknown-to-nvcc": "nvcc",
    "launch/command-not-found": "the shell",
    "start-up/context-too-long": "vLLM and SGLang",
    "start-up/extension-file-missing": "the loader of Linux",
    "start-up/cpp-standard": "PyTorch's headers",
    "start-up/context-of-model": "vLLM",
    "start-up/map-lengths": "Arrow",
    "launch/ray-resources": "verl and Ray",
    "save/megatron-keys": "Megatron",
    "start-up/arrow-too-large": "Arrow",
    "start-up/attention-backend": "Transformer Engine",
    "start-up/experts-tokens": "PyTorch's build for CUDA",
    "start-up/no-batches": "Python",
    "start-up/number-format-of-newer-gpu": "Triton on a GPU",
    "start-up/zero-parameter-unknown": "Python",
    "start-up/data-cache-disk-full": "the operating system",
    "launch/cublas": "PyTorch's build for CUDA",
    "launch/cuda-unknown-error": "PyTorch's build for CUDA",
    "launch/driver-mismatch": "NVIDIA's driver",
    "launch/illegal-access": "PyTorch's build for CUDA",
    "launch/name-in-own-script": "Python",
    "launch/network-mount": "the operating system",
    "launch/rank-variable": "Python",
    "launch/syntax": "Python",
    "launch/threads": "the operating system",
    "launch/wandb-network": "wandb",
    "save/hub-push": "the hub",
    "save/rank-file-missing": "Python",
    "save/rename-race": "Python",
    "save/storage": "PyTorch, in C++",
    "start-up/adapter-of-newer-peft": "Python",
    "start-up/bitsandbytes-library": "Python",
    "start-up/chat-roles": "the chat templates of models",
    "start-up/column-missing": "Python",
    "start-up/compile-failed": "the compiler of PyTorch",
    "start-up/cuda-library-missing": "the loader of Linux",
    "start-up/cudnn-version": "PyTorch's build for CUDA",
    "start-up/divisible": "several programs",
    "start-up/engine-parallel": "vLLM",
    "start-up/engine-server": "TRL",
    "start-up/engine-start": "vLLM",
    "start-up/engine-weight-names": "vLLM",
    "start-up/glibc": "the loader of Linux",
    "start-up/hub-of-other-release": "Python",
    "start-up/kv-cache-too-small": "vLLM",
    "start-up/model-code-of-other-release": "Python",
    "start-up/not-picklable": "Python",
    "start-up/numpy-aliases": "NumPy",
    "start-up/prompt-too-long": "vLLM",
    "start-up/pydantic-of-other-release": "pydantic",
    "start-up/quantized-moved": "transformers with bitsandbytes on a GPU",
    "save/step-from-name": "scripts that resume",
    "start-up/torch-too-old": "Python",
    "start-up/torchvision-of-other-torch": "torchvision",
    "start-up/triton-of-other-torch": "Python",
    "start-up/triton-shared-memory": "Triton on a GPU",
}

STARTS_PYTHON = {"launch/script-not-found"}  # the raising function starts another Python

SOUND = Path(__file__).parents[1] / "fixtures" / "why" / "sound.log"  # with the warnings that sound trainings print


def first_cause(text: str) -> str | None:
    cause = answer.answer_lines(text.splitlines()).cause
    return cause.id if cause else None


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    """Forget the state that accelerate keeps in its process."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize("rule", MESSAGES, ids=lambda rule: rule.id)
def test_a_rule_is_the_first_cause_of_its_example(rule: known.Rule):
    assert first_cause(rule.example) == rule.id


def test_every_sentence_can_be_filled():
    for rule in (rule for rule in MESSAGES if not rule.general):
        cause = next(cause for cause in answer.answer_lines(rule.example.splitlines()).causes if cause.id == rule.id)
        names = re.compile(rule.match or "").groupindex
        text = "\n".join((cause.happened, cause.because, *cause.changes, cause.check))
        assert not [name for name in names if f"{{{name}}}" in text], rule.id


def test_braces_that_are_no_group_stay():
    rule = known.Rule(
        id="save/braces", kind="save", match=r"(?P<old>a)|(?P<new>b)|(?P<none>c)",
        happened="{old}{new} is {'x': 1} ({none})",
        because='{"bf16": {"enabled": true}}', example="error b",
    )  # fmt: skip
    cause = rule.found(answer.answer_lines(["error b"]).log)
    assert cause is not None
    assert (cause.happened, cause.because) == ("b is {'x': 1}", '{"bf16": {"enabled": true}}')


def test_values_are_those_of_the_exception_and_not_of_the_quoted_code():
    log = """Traceback (most recent call last):
  File "/env/deepspeed/launcher/runner.py", line 248, in _parse_hostfile
    raise ValueError(f"Hostfile contains a bad entry: {line}, unable to proceed with launching")
ValueError: Hostfile contains a bad entry: worker-0 gpus=8, unable to proceed with launching"""
    cause = answer.answer_lines(log.splitlines()).cause
    assert cause is not None
    assert "worker-0 gpus=8" in cause.happened
    assert [line.number for line in cause.evidence] == [4, 3]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=pytest.mark.launches if rule in STARTS_PYTHON else ()) for rule in why_errors.RAISERS],
)
def test_a_real_error_is_recognized(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any, accelerate_state: None
):
    tools = why_errors.Tools(tmp_path, monkeypatch, lambda: request.getfixturevalue("group"))
    try:
        text = why_errors.RAISERS[rule](tools)
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
        text = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)
    assert text, "nothing was raised"
    assert first_cause(text) == rule


@pytest.mark.parametrize("rule", SOURCES)
def test_an_installed_file_has_the_message(rule: str):
    file, part = SOURCES[rule]
    with (PACKAGES / file).open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(part.encode()) >= 0


def test_every_rule_is_raised_or_in_a_source_or_in_a_public_thread_or_has_a_reason():
    proved = {*why_errors.RAISERS, *SOURCES}
    with_thread = {rule.id for rule in OWN if rule.seen}
    assert {rule.id for rule in OWN} == {*proved, *ELSEWHERE, *with_thread}
    assert proved.isdisjoint(ELSEWHERE)
    assert len(proved) > len(OWN) / 2


def test_threads_of_rules_have_even_numbers():
    """Threads with odd numbers are kept for judging the answers. Nobody who writes rules reads them."""
    for rule in known.rules():
        for address in rule.seen:
            assert int(address.rpartition("/")[2]) % 2 == 0, (rule.id, address)


def test_every_rule_says_who_raises_it_and_what_to_change():
    for rule in OWN:
        assert rule.raised_by or rule.seen, rule.id
        assert rule.changes, rule.id
        for file in re.findall(r"[\w-]+(?:/[\w-]+)+\.py", rule.raised_by):
            assert (PACKAGES / file).is_file(), (rule.id, file)
        for package, release in re.findall(
            r"(accelerate|deepspeed|transformers|peft|safetensors) (\d+\.\d+\.\d+):", rule.raised_by
        ):
            installed = importlib.metadata.version(package)
            assert release == installed, f"{rule.id} was found in {package} {release}, and {installed} is installed"


@pytest.mark.parametrize("rule", MESSAGES, ids=lambda rule: rule.id)
def test_a_rule_is_fast_on_long_lines(rule: known.Rule):
    pattern = re.compile(rule.match or rule.cut_off)
    words = ("a", "a.", "a/b", "ab:", "'a", "[0, ", "/a.so", "a_", "1", "a ", " ", f"{rule.example} ")
    begin = time.process_time()
    for word in words:
        pattern.search((word * 4000)[:4000])
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(
    "line",
    [
        "model.embed_tokens.weight                   | MISSING    | ",
        "model.layers.{0, 1}.mlp.up_proj.weight      | MISSING    | ",
        "Some weights of LlamaForSequenceClassification were not initialized from the model checkpoint at out and are "
        "newly initialized: ['model.norm.weight', 'score.weight']",
    ],
)
def test_new_weights_that_are_no_head_are_a_cause(line: str):
    assert first_cause(line) == "wrong/new-weights"


def test_warnings_of_a_sound_training_are_no_cause():
    causes = answer.answer_lines(SOUND.read_text(encoding="utf-8").splitlines()).causes
    assert [cause.id for cause in causes if cause.kind in KINDS] == []
    assert [cause.id for cause in causes if cause.certainty != "possible"] == []
