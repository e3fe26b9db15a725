"""`zero-study why` names the cause that a log shows, in public cases and for every conclusion that it can draw."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import math
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from refusing import refusal

from zero_study import cli
from zero_study.errors import Refusal
from zero_study.why import answer, known, log, memory_messages, planned, recordings, tensors, text
from zero_study.why.cause import Cause
from zero_study.why.setting import Setting

CASES = Path(__file__).parents[1] / "why"
GIB = 1 << 30


def first(lines: str | Sequence[str], **setting: object) -> str | None:
    """Return the id of the first cause in a log."""
    given_lines = lines.splitlines() if isinstance(lines, str) else lines
    found = answer.answer_lines(given_lines, Setting(**setting))
    return None if found.cause is None else found.cause.id


# ---------------------------------------------------------------- public cases


@pytest.mark.parametrize("path", sorted(CASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_public_log_gets_the_answer_that_was_written_down(path):
    case = yaml.safe_load(path.read_text())
    found = answer.answer([path.with_suffix(".log")])
    assert (found.cause.id if found.cause else None) == case["answer"]


@pytest.mark.parametrize("path", sorted((CASES / "learned").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_learned_log_gets_the_answer_that_was_written_down(path):
    case = yaml.safe_load(path.read_text())
    found = answer.answer([path.with_suffix(".log")])
    assert (found.cause.id if found.cause else None) == case["answer"]
    assert int(case["source"].rpartition("/")[2]) % 2 == 0


def cases_of(folder: str) -> list[dict]:
    return [yaml.safe_load(path.read_text()) for path in sorted((CASES / folder).glob("*.yaml"))]


def test_a_thread_is_in_one_set_only_unless_the_case_says_from_where_it_is_known():
    sets = [cases_of(folder) for folder in (".", *(path.name for path in sorted(CASES.glob("held_out*"))))]
    new = Counter(case["source"] for cases in sets for case in cases if "thread_known_from" not in case)
    assert {source for source, times in new.items() if times > 1} == set()
    assert not {case["source"] for case in sets[-1]} & {case["source"] for case in cases_of("learned")}
    for case in (case for cases in sets for case in cases if "thread_known_from" in case):
        earlier = yaml.safe_load((CASES / f"{case['thread_known_from']}.yaml").read_text())
        assert earlier["source"] == case["source"]


# ---------------------------------------------------------------- one example for each conclusion

WATCHDOG = (
    "[rank{rank}]:[E1218 12:49:09.0865 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={size}, NumelOut={size}, Timeout(ms)=1800000) ran "
    "for 1800046 milliseconds before timing out."
)


def waiting(*calls: tuple[int, int, str, int]) -> list[str]:
    """Return the lines of watchdogs, of rank, number, operation and size."""
    names = ("rank", "number", "operation", "size")
    return [WATCHDOG.format(**dict(zip(names, call, strict=True))) for call in calls]


def out_of_memory(
    *frames: str, tried: str = "1.50 GiB", more: str = "", unused: str = "200.00 MiB", allocated: str = "76.00 GiB"
) -> list[str]:
    """Return a traceback that ends in PyTorch's message, with frames as "file.py:function"."""
    lines = ["Traceback (most recent call last):"]
    for frame in frames:
        file, _, function = frame.rpartition(":")
        lines += [f'  File "/env/lib/python3.11/site-packages/{file}", line 1, in {function}', "    pass"]
    return [
        *lines,
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.14 "
        f"GiB of which 1.00 GiB is free. {more}Of the allocated memory {allocated} is allocated by PyTorch, and "
        f"{unused} is reserved by PyTorch but unallocated.",
    ]


def steps(count: int, **columns: Callable[[int], float | str]) -> list[str]:
    """Return what Trainer prints for steps."""
    return [str({name: value(step) for name, value in columns.items()}) for step in range(1, count + 1)]


def falling(step: int) -> float:
    return round(3 / math.sqrt(step) + 0.01 * math.sin(step), 4)


def norms(step: int) -> float:
    return round(1 + 0.1 * math.sin(step), 4)


WATCHDOG_STUCK = (
    "[rank1]:[E518 12:05:59.05 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL's "
    "watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."
)

EXAMPLES: dict[str, list[str]] = {
    "memory/large-images": [
        "[INFO:swift] Setting max_pixels: 12845056. You can adjust this hyperparameter through MAX_PIXELS.",
        *out_of_memory(),
    ],
    "slow/waiting-for-data": [
        f"INFO step:{step} loss:1.05 grdn:4.48 lr:1.8e-06 updt_s:0.302 data_s:{1.5 if step % 4 == 0 else 0.001}"
        for step in range(1, 20)
    ],
    "wrong/output-uniform": steps(6, loss=lambda step: 11.7835, grad_norm=lambda step: 0.0),
    "wrong/answers-masked": steps(
        3, loss=lambda step: 0.6931, **{"logps/chosen": lambda step: 0.0, "logps/rejected": lambda step: 0.0}
    ),
    "hang/preparation": [
        "Tokenizing (num_proc=8):  92%|████| 328986/359152 [29:58<12:05, 41.59 examples/s]",
        *waiting((1, 1, "ALLREDUCE", 1)),
    ],
    "hang/activity-of-some-ranks": ["***** Running Evaluation *****", *waiting((1, 411, "ALLREDUCE", 52_000_000))],
    "hang/different-sizes": waiting((0, 9, "BROADCAST", 64), (1, 9, "BROADCAST", 4096)),
    "hang/different-calls": waiting((0, 9, "BROADCAST", 64), (1, 9, "ALLREDUCE", 4096)),
    "hang/rank-behind": waiting((0, 959, "ALLREDUCE", 544_997_376), (1, 963, "ALLREDUCE", 2560)),
    "hang/first-collective": waiting((1, 1, "ALLREDUCE", 1_000_000)),
    "hang/number": [*steps(30, loss=falling), *waiting((0, 900, "ALLREDUCE", 1), (1, 900, "ALLREDUCE", 1))],
    "hang/different-steps": [
        "  7%|▋    | 499/7151 [3:38:58<49:46:17, 26.94s/it]",
        "  7%|▋    | 496/7151 [3:38:58<46:22:13, 25.08s/it]",
        *waiting((0, 129_457, "ALLREDUCE", 525_340_672)),
    ],
    "hang/gather": waiting((0, 517, "_ALLGATHER_BASE", 11_718_912), (1, 517, "_ALLGATHER_BASE", 11_718_912)),
    "hang/gather-in-another-order": [
        "Invalidate trace cache @ step 1: expected module 25, but got module 323",
        *waiting((1, 211_067, "_ALLGATHER_BASE", 2_359_296)),
    ],
    "hang/gather-on-rank-0": waiting((0, 517, "_ALLGATHER_BASE", 11_718_912)),
    "hang/silent-at-end": [
        "1|16|Loss: 2.57: 100%|██████████| 16/16 [00:25<00:00,  1.48s/it]",
        *waiting((0, 150, "_ALLGATHER_BASE", 1_000_000), (2, 150, "_ALLGATHER_BASE", 1_000_000)),
    ],
    "launch/hidden-gpus": [
        "export CUDA_VISIBLE_DEVICES=4,5,6",
        "RuntimeError: CUDA error: invalid device ordinal",
    ],
    "memory/activations-dominate": [
        "--model_name_or_path Qwen/Qwen2.5-7B-Instruct --lora_rank 8",
        *out_of_memory(tried="1.10 GiB"),
    ],
    "slow/compiler-is-active": [
        'Thread 812 (active): "MainThread"',
        "    make_cubin (triton/backends/nvidia/compiler.py:410)",
        "    compile (triton/compiler/compiler.py:297)",
        "    run (triton/runtime/jit.py:612)",
        "    chunk_fwd (fla/ops/gated_delta_rule/chunk.py:88)",
    ],
    "slow/later-release": [
        "| batch | deepspeed 0.14.2 (s/it) seconds | deepspeed 0.15.0 (s/it) seconds |",
        "| --- | --- | --- |",
        "| 8 | 1.20 | 1.50 |",
        "| 16 | 2.30 | 2.90 |",
    ],
    "hang/rank-0-elsewhere": waiting((1, 22, "ALLREDUCE", 1), (2, 22, "ALLREDUCE", 1)),
    "hang/gradients": waiting((0, 517, "ALLREDUCE", 11_718_912), (1, 517, "ALLREDUCE", 11_718_912)),
    "hang/barrier-at-start": waiting((1, 2, "ALLREDUCE", 1), (2, 2, "ALLREDUCE", 1)),
    "hang/mixed-modalities": [
        "--model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct",
        *waiting((0, 517, "_ALLGATHER_BASE", 11_718_912), (1, 517, "_ALLGATHER_BASE", 11_718_912)),
    ],
    "hang/experts": [
        "--model_name_or_path mistralai/Mixtral-8x7B-v0.1",
        *waiting((0, 517, "_ALLGATHER_BASE", 11_718_912), (1, 517, "_ALLGATHER_BASE", 11_718_912)),
    ],
    "hang/uneven-batches": [
        " 99%|█████████▉| 1245/1250 [3:38:58<00:49, 9.94s/it]",
        *waiting((0, 9517, "ALLREDUCE", 11_718_912), (1, 9517, "ALLREDUCE", 11_718_912)),
    ],
    "hang/rollout": [
        "{'loss': 0.1, 'rewards/accuracy': 0.5} grpo",
        *waiting((0, 517, "ALLREDUCE", 11_718_912), (1, 517, "ALLREDUCE", 11_718_912)),
    ],
    "hang/watchdog-stuck-at-start": [WATCHDOG_STUCK],
    "hang/watchdog-stuck": [*steps(9, loss=lambda step: 3.0 / step, grad_norm=lambda step: 1.0 / step), WATCHDOG_STUCK],
    "hang/time-out": ["[rank0]: watchdog thread terminated with exception"],
    "memory/long-sample": [
        "perf 272: {'rollout/response_len/median': 680.0, 'rollout/response_len/max': 61565}",
        *out_of_memory("x/loss.py:forward"),
    ],
    "memory/growth": [
        *steps(20, loss=falling, **{"memory(GiB)": lambda step: 40 + 1.5 * step}),
        *out_of_memory("torch/nn/modules/module.py:_call_impl"),
    ],
    "memory/whole-model-gathered": [
        "{'loss': 0.5, 'memory(GiB)': 5.78}",
        *out_of_memory("deepspeed/runtime/zero/partition_parameters.py:_all_gather"),
    ],
    "memory/other-process": out_of_memory(
        "torch/nn/modules/module.py:_call_impl",
        allocated="60.00 GiB",
        more="Process 7 has 60.60 GiB memory in use. Process 8 has 17.00 GiB memory in use. ",
    ),
    "memory/fragmentation": out_of_memory("torch/nn/modules/module.py:_call_impl", unused="12.00 GiB"),
    "memory/outside-pytorch": out_of_memory(
        more="Including non-PyTorch memory, this process has 86.00 GiB memory in use. "
    ),
    "memory/building": out_of_memory("transformers/modeling_utils.py:from_pretrained"),
    "memory/wrapping": out_of_memory("accelerate/accelerator.py:prepare", "torch/nn/modules/module.py:to"),
    "memory/optimizer-states": out_of_memory("train.py:main", "torch/optim/adamw.py:_init_group"),
    "memory/gathered-parameters": out_of_memory("deepspeed/runtime/zero/partition_parameters.py:_all_gather"),
    "memory/logits": out_of_memory(
        "transformers/loss/loss_utils.py:ForCausalLMLoss", "torch/nn/functional.py:cross_entropy"
    ),
    "memory/attention": out_of_memory("transformers/models/llama/modeling_llama.py:eager_attention_forward"),
    "memory/activations-recomputed": out_of_memory("torch/utils/checkpoint.py:recompute_fn", "x/mlp.py:run"),
    "memory/activations-and-gradients": out_of_memory(
        "torch/_tensor.py:backward", "torch/autograd/__init__.py:backward"
    ),
    "memory/activations": out_of_memory(
        "train.py:main", "transformers/models/llama/modeling_llama.py:forward", "x/mlp.py:run"
    ),
    "memory/evaluation": out_of_memory("transformers/trainer.py:evaluation_loop", "x/modeling.py:forward"),
    "memory/generation": out_of_memory("transformers/generation/utils.py:generate", "x/modeling.py:forward"),
    "memory/saving": out_of_memory("transformers/trainer.py:save_model", "torch/nn/modules/module.py:state_dict"),
    "memory/too-large": out_of_memory(),
    "memory/evaluation-outputs": out_of_memory(
        "transformers/trainer.py:evaluation_loop", "transformers/trainer_pt_utils.py:nested_concat"
    ),
    "memory/inference-engine-start": out_of_memory("vllm/worker/worker.py:determine_num_available_blocks"),
    "memory/state-dict-8-bit": out_of_memory(
        "transformers/trainer.py:save_model", "bitsandbytes/nn/modules.py:_save_to_state_dict"
    ),
    "memory/loaded-checkpoint": out_of_memory("train.py:resume", "torch/serialization.py:_load"),
    "memory/resumed": ["Resuming from out/ckpt.pt", *out_of_memory()[1:]],
    "memory/building-quantized": [
        "load_in_4bit: true",
        *out_of_memory("transformers/modeling_utils.py:from_pretrained"),
    ],
    "memory/no-checkpointing": ["gradient_checkpointing: False", *out_of_memory()[1:]],
    "memory/quantized-activations": ["load_in_4bit: True", *out_of_memory()[1:]],
    "memory/clip-gradients": out_of_memory("train.py:main", "torch/nn/utils/clip_grad.py:_get_total_norm"),
    "memory/log-probabilities": out_of_memory("trl/trainer/utils.py:selective_log_softmax"),
    "memory/entropy": out_of_memory("verl/utils/torch_functional.py:entropy_from_logits"),
    "memory/one-large-tensor": out_of_memory(tried="24.00 GiB")[-1:],
    "memory/merge": out_of_memory("peft/tuners/lora/layer.py:merge_and_unload", "peft/x.py:get_delta_weight"),
    "wrong/loss-rises": steps(60, loss=lambda step: 2.0 if step < 30 else 6.2 + 0.1 * math.sin(step), grad_norm=norms),
    "memory/peak-of-activations": ["step=0 TRAIN alloc=10.33 peak=68.03 GiB"],
    "memory/other-process-engine": out_of_memory(
        "x/weight_sync/strategy.py:send_chunks",
        allocated="60.00 GiB",
        more="Process 7 has 60.60 GiB memory in use. Process 8 has 17.00 GiB memory in use. ",
    ),
    "slow/compilation": ["(EngineCore) Dynamo bytecode transform time: 15.26 s", "step: 1 loss: 1.5 dt: 0.5s"],
    "slow/compilation-noted": [
        "torch.compile takes 12.30 s in total",
        *[f"iter {n}: loss {falling(n + 1)}, time {9000 + n % 3}ms" for n in range(40)],
    ],
    "slow/recompiled": [
        "torch._dynamo.guards.__recompiles: [DEBUG] Recompiling function accumulate in train.py:6",
        "torch._dynamo.guards.__recompiles: [DEBUG]     - L['start'] == 1   # result = X0[start]",
    ]
    * 4,
    "slow/rank": [
        f"rank {rank}: step {step} took {100 + 80 * (rank == 2)} ms" for step in range(6) for rank in range(4)
    ],
    "slow/ranks-differ": ["    forward-backward ...............................: (512.10, 2210.50)"] * 3,
    "slow/straggler": ["Straggler detected at step 10"],
    "slow/preparation": ["Map: 100%|████| 1319/1319 [1:37:35<00:00, 4.44s/examples]"],
    "slow/preparation-of-workers": ["Map (num_proc=8): 100%|████| 1319/1319 [1:37:35<00:00, 4.44s/examples]"],
    "wrong/table-not-finite": [
        "| Step | norm |",
        "|---|---|",
        *(f"| {n} | {2.5 - n / 9 if n < 4 else 'NaN'} |" for n in range(8)),
    ],
    "wrong/table-stands-still": [
        "| Step | norm |",
        "|---|---|",
        *(f"| {n} | {max(1.4142135, 2.5 - n / 2)} |" for n in range(9)),
    ],
    "wrong/table-factor": [
        "grad_norm | step1 | step2 | step3 | step4 | step5",
        "-- | -- | -- | -- | -- | --",
        "zero1 | 15.825 | 16.646 | 15.853 | 16.159 | 17.333",
        "zero0 | 3.956 | 4.161 | 3.963 | 4.040 | 4.333",
    ],
    "wrong/metric-stands-still": steps(12, loss=falling, grad_norm=norms, trust_ratio=lambda _: 0.0123),
    "start-up/packages-do-not-fit": [
        "Traceback (most recent call last):",
        '  File "/env/lib/python3.11/site-packages/transformers/trainer.py", line 1, in train',
        '  File "/env/lib/python3.11/site-packages/accelerate/accelerator.py", line 1, in prepare',
        "NotImplementedError: abstract method frob",
    ],
    "launch/signal-1": ["torch.distributed.elastic.multiprocessing.api.SignalException: Process 41 got signal: 1"],
    "launch/signal-4": ["  exitcode  : -4 (pid: 212)"],
    "launch/signal-6": ["  exitcode  : -6 (pid: 212)"],
    "launch/signal-7": ["  exitcode  : -7 (pid: 212)"],
    "launch/signal-11": ["[INFO] [launch.py:347:main] Process 212 exits with return code = -11"],
    "launch/signal-15": ["[INFO] [launch.py:347:main] Process 212 exits with return code = -15"],
    "slow/first-step": [
        f"iter {n}: loss {falling(n + 1)}, time {7961.9 if not n else 22.1 + n % 3}ms" for n in range(20)
    ],
    "slow/growth": [f"iter {n}: loss {falling(n + 1)}, time {200 + 10 * n}ms" for n in range(40)],
    "slow/periodic": [
        f"iter {n}: loss {falling(n + 1)}, time {900 if n % 8 == 7 else 200 + n % 3}ms" for n in range(48)
    ],
    "slow/other-work": ["step: 1 loss: 1.5", "Finished saving the checkpoint in 393.86 seconds."],
    "slow/stated-network": [
        "--nnodes=4 --fsdp full_shard",
        *[f"iter {n}: loss {falling(n + 1)}, time {9000 + n % 3}ms" for n in range(20)],
    ],
    "slow/stated-offload": [
        "offload_optimizer: {device: cpu}",
        *[f"iter {n}: loss {falling(n + 1)}, time {9000 + n % 3}ms" for n in range(20)],
    ],
    "slow/stated-generation": [
        "algorithm: grpo",
        *[f"iter {n}: loss {falling(n + 1)}, time {9000 + n % 3}ms" for n in range(20)],
    ],
    "slow/stated-eager": [
        "attn_implementation: eager",
        *[f"iter {n}: loss {falling(n + 1)}, time {9000 + n % 3}ms" for n in range(20)],
    ],
    "wrong/nan-fp16": ["fp16: true", *steps(6, loss=falling, grad_norm=lambda _: math.nan)],
    "wrong/nan-softcap": [
        "--model_name_or_path google/gemma-2-9b",
        *steps(6, loss=lambda step: 2.0 / step, grad_norm=lambda _: math.nan),
    ],
    "wrong/evaluation-nan": [*steps(6, loss=falling, grad_norm=norms), "{'eval_loss': nan, 'epoch': 1.0}"],
    "wrong/evaluation-nan-fp16": [
        "fp16: true",
        *steps(6, loss=falling, grad_norm=norms),
        "{'eval_loss': nan, 'epoch': 1.0}",
    ],
    "wrong/loss-zero-of-policy": steps(8, loss=lambda _: 0.0, grad_norm=norms, reward=lambda _: 0.5),
    "wrong/rewards-equal": steps(8, loss=lambda _: 0.0, grad_norm=lambda _: 0.0, reward=lambda _: 0.5),
    "wrong/gradients-nan": steps(6, loss=falling, grad_norm=lambda _: math.nan),
    "wrong/gradients-nan-zero2": ["--deepspeed ds_zero2.json", *steps(6, loss=falling, grad_norm=lambda _: math.nan)],
    "wrong/loss-zero": steps(8, loss=lambda _: 0.0, grad_norm=lambda _: 0.0),
    "wrong/loss-scale": [
        f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2 ** max(0, 16 - n)}, reducing to "
        f"{2 ** max(0, 15 - n)}"
        for n in range(20)
    ],
    "wrong/norm-zero": steps(8, loss=lambda step: 2.5 + step % 2 / 100, grad_norm=lambda _: 0.0),
    "wrong/norm-constant": steps(12, loss=falling, grad_norm=lambda _: 0.7315),
    "wrong/norm-is-clipping": ["max_grad_norm: 1.0", *steps(12, loss=falling, grad_norm=lambda _: 1.0)],
    "wrong/rate-zero": steps(8, loss=falling, learning_rate=lambda _: 0.0),
    "wrong/loss-constant": steps(30, loss=lambda _: 2.5),
    "wrong/loss-of-chance": steps(60, loss=lambda step: 10.82 + 0.01 * math.sin(step)),
    "wrong/ranks-apart": [
        f"[rank{rank}]: {{'step': {step}, 'loss': {falling(step)}, 'grad_norm': {1 + 0.2 * rank + 0.01 * step}}}"
        for step in range(1, 12)
        for rank in (0, 1)
    ],
    "wrong/short-epoch": [
        "  Num examples = 80,000",
        "  Num Epochs = 1",
        "  Instantaneous batch size per device = 4",
        "world_size=4",
        "  Total optimization steps = 1,250",
    ],
    "wrong/diverged": [
        *steps(10, loss=falling, grad_norm=norms),
        *steps(4, loss=lambda _: 0.0, grad_norm=lambda _: math.nan),
    ],
    "wrong/nan-from-the-start": steps(4, step=lambda step: step, loss=lambda _: math.nan, grad_norm=lambda _: math.nan),
    "wrong/nan-when-log-begins": steps(4, loss=lambda _: math.nan, grad_norm=lambda _: math.nan),
    "wrong/loss-and-norm-large": steps(6, loss=lambda step: 15 + 7 / step, grad_norm=lambda step: 170 + 300 / step),
    "wrong/schedule-too-fast": steps(
        60, loss=falling, grad_norm=norms, learning_rate=lambda step: max(0, 30 - step) * 1e-6
    ),
    "wrong/loss-too-large": [
        "--model_name_or_path Qwen/Qwen3-8B",
        *steps(6, loss=lambda step: 40.0 / step + 30, grad_norm=norms),
    ],
    "wrong/jump-after-resuming": [
        *steps(20, loss=falling, step=lambda step: step),
        "Resuming from checkpoint-20",
        "{'loss': 9.7, 'step': 20}",
        "{'loss': 9.1, 'step': 21}",
    ],
}
ELSEWHERE = {  # tested with files below
    "hang/recorded-calls",
    "hang/network",
    "memory/snapshot",
    "memory/snapshot-fragmented",
    "slow/computing",
    "slow/communication",
    "slow/copies",
    "slow/idle",
    "slow/than-predicted",
}


def test_every_conclusion_has_an_example():
    conclusions = {rule.id for rule in known.rules() if rule.is_conclusion}
    assert conclusions == EXAMPLES.keys() | ELSEWHERE


@pytest.mark.parametrize("id", EXAMPLES)
def test_a_conclusion_is_the_first_cause_of_its_example(id):
    assert first(EXAMPLES[id]) == id


def test_ids_are_unique():
    ids = [rule.id for rule in known.rules()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("id", EXAMPLES)
def test_an_answer_has_no_open_places(id):
    found = answer.answer_lines(EXAMPLES[id])
    displayed = text.text(found)
    assert "{" not in displayed.replace("offload_optimizer: {", "").split("line ")[0]
    json.dumps(answer.content(found))


# ---------------------------------------------------------------- what comes first


def test_the_rank_that_ended_first_is_the_cause_and_not_the_ranks_that_waited():
    crash = [f"[rank3]: {line}" for line in out_of_memory("torch/optim/adamw.py:_init_group")]
    assert (
        first([*crash, *waiting((0, 51, "ALLREDUCE", 4096), (1, 51, "ALLREDUCE", 4096))]) == "memory/optimizer-states"
    )


def test_what_a_launcher_says_at_the_end_is_not_the_cause():
    closing = [
        "  exitcode  : -15 (pid: 1)",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED",
    ]
    assert first([*out_of_memory("transformers/modeling_utils.py:from_pretrained"), *closing]) == "memory/building"


def test_an_unknown_exception_comes_before_what_follows_from_it():
    lines = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/x/train.py", line 9, in step',
        "[rank1]: ValueError: bad sample 7",
        "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:45021",
    ]
    found = answer.answer_lines(lines)
    assert found.cause is None
    assert found.first_failure is not None
    assert found.first_failure.message == "bad sample 7"
    assert found.verdict.status == 3
    assert "in step (/x/train.py, line 9)" in " ".join(text.text(found).split())


def test_an_exception_without_a_text_is_the_first_failure():
    lines = [
        f"[rank2]: {line}"
        for line in ("Traceback (most recent call last):", '  File "/x/t.py", line 3, in f', "StopIteration")
    ]
    found = answer.answer_lines([*lines, *waiting((0, 51, "ALLREDUCE", 4096), (1, 51, "ALLREDUCE", 4096))])
    assert found.first_failure is not None
    assert (found.first_failure.kind, found.cause) == ("StopIteration", None)


def test_ranks_that_only_say_that_they_waited_count():
    lines = [
        "[rank1]:[E1128 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due "
        "to a collective timeout from this local rank. Last enqueued NCCL work: 22, last completed NCCL work: 21.",
        "[rank0]:[E1128 ProcessGroupNCCL.cpp:1806] [PG ID 0 PG GUID 0(default_pg) Rank 0] Observed flight recorder "
        "dump signal from another rank via TCPStore.",
    ]
    assert first(lines) == "hang/rank-0-elsewhere"


def test_a_message_of_the_watchdog_over_several_lines_is_read():
    lines = [
        "`Trainer.fit` stopped: `max_epochs=3` reached.",
        "[Rank 0] Watchdog caught collective operation timeout:",
        "  WorkNCCL(..., OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000)",
    ]
    assert first(lines) == "hang/activity-of-some-ranks"


def test_a_dictionary_over_several_lines_is_one_row():
    lines = [
        "{",
        "    'loss': 2.3101,",
        "    'grad_norm': nan,",
        "}",
        "{",
        "    'loss': 0.0,",
        "    'grad_norm': nan,",
        "}",
    ]
    assert first(lines) == "wrong/gradients-nan"


def test_a_traceback_without_its_end_is_no_sound_training():
    lines = [*steps(5, loss=falling), "Traceback (most recent call last):", '  File "/x/train.py", line 3, in main']
    found = answer.answer_lines(lines)
    assert (found.cause, found.is_sound, found.verdict.status) == (None, False, 3)
    assert "main" in text.text(found)


@pytest.mark.parametrize(
    ("frame", "id"),
    [
        ('File "/env/torch/amp/grad_scaler.py", line 338, in unscale_', "start-up/unscale-cut-off"),
        ('File "/env/transformers/modeling_utils.py", line 3, in from_pretrained', "memory/building"),
        ('File "/x/train.py", line 3, in main', None),
    ],
)
def test_the_functions_of_a_traceback_without_its_end_decide(frame, id):
    found = answer.answer_lines(["Traceback (most recent call last):", f"  {frame}"])
    assert (found.cause.id if found.cause else None) == id
    assert found.cause is None or found.cause.certainty != "certain"


def test_what_the_log_states_decides_between_causes():
    killed = "ERROR: failed (exitcode: -9) local_rank: 1 (pid: 47139) of binary: /usr/bin/python"
    assert first([killed]) == "memory/host-killed"
    assert first(['"offload_optimizer": {"device": "cpu"}', killed]) == "memory/host-killed-offload"
    assert first(['"offload_optimizer": {"device": "none"}', killed]) == "memory/host-killed"


def test_a_log_that_ends_at_the_start_of_a_run_is_explained_only_if_nothing_was_trained():
    start = "[INFO] [comm.py:668:init_distributed] Initializing TorchBackend in DeepSpeed with backend nccl"
    assert first([start]) == "hang/rendezvous-silent"
    assert first([*steps(5, loss=falling), start]) is None


def test_the_tokens_of_an_allocation_follow_from_the_vocabulary_that_the_log_states():
    lines = ["vocab_size: 152064", *out_of_memory("verl/utils/torch_functional.py:logprobs_from_logits")]
    cause = answer.answer_lines(lines).cause
    assert cause is not None
    assert f"{1.5 * GIB / 4 / 152_064:,.0f} tokens" in cause.because


def test_a_folder_of_a_model_is_a_known_model():
    shape = tensors.shape_of("/data/models/Qwen2.5-7B-Instruct")
    assert shape is not None
    assert shape.vocabulary == tensors.shape_of("qwen/qwen2.5-7b").vocabulary
    assert tensors.shape_of("/data/models/own") is None


def test_packages_are_named_only_if_the_exception_is_inside_of_one():
    lines = [
        "Traceback (most recent call last):",
        '  File "/x/train.py", line 1, in main',
        "AttributeError: 'Model' object has no attribute 'own'",
    ]
    assert first(lines) == "start-up/attribute-of-own-class"
    inside = [*lines[:2], '  File "/env/site-packages/frob/core.py", line 1, in call', lines[2]]
    assert first(inside) == "start-up/attribute-of-other-release"


def test_a_warning_that_the_logged_norms_refute_is_no_note():
    warning = "UserWarning: None of the inputs have requires_grad=True. Gradients will be None"
    assert first([warning, *steps(5, loss=falling, grad_norm=norms)]) is None
    assert first([warning]) == "wrong/no-gradient"
    ignored = (
        "UserWarning: Could not find response key `[1]` in the following instance: x This instance will be ignored"
    )
    assert first([ignored, *steps(5, loss=falling, grad_norm=norms)]) is None
    assert first([ignored, *steps(5, loss=lambda _: 0.0)]) == "wrong/response-template"


def test_the_phase_is_the_last_activity_if_there_is_no_traceback():
    assert first(["***** Running Evaluation *****", *out_of_memory()[1:]]) == "memory/evaluation"
    assert first(["python train.py --eval_steps 5", *out_of_memory()[1:]]) == "memory/too-large"
    assert first(["grpo --use_vllm True", *out_of_memory()[1:]]) == "memory/generation"


def test_lines_of_ranks_that_are_written_into_each_other_are_read():
    mixed = "[rank0]: Traceback (most recent call last):[rank1]: Traceback (most recent call last):"
    read = log.read(
        [
            mixed,
            '[rank1]:   File "/x/train.py", line 3, in main[rank0]:   File "/x/a.py", line 1, in f',
            "[rank1]: ValueError: one[rank0]: KeyError: 'two'",
        ]
    )
    assert {(failure.rank, failure.kind, failure.frames[-1].function) for failure in read.failures} == {
        (0, "KeyError", "f"),
        (1, "ValueError", "main"),
    }


@pytest.mark.parametrize(
    ("line", "rank", "rest"),
    [
        ("[rank3]: hello", 3, "hello"),
        ("[default7]:hello", 7, "hello"),
        ("[1,5]<stderr>:hello", 5, "hello"),
        ("12: [2026] hello", 12, "[2026] hello"),
        ("worker-5: [rank22]: hello", 22, "hello"),
        ("(WorkerDict pid=12, ip=10.0.0.1) hello", None, "hello"),
        ("hello [rank", None, "hello [rank"),
        ("3 errors", None, "3 errors"),
    ],
)
def test_marks_of_ranks_are_read(line, rank, rest):
    assert list(log.parts(line)) == [(rank, rest)]


# ---------------------------------------------------------------- messages of memory

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.11 GiB. GPU 0 has a total capacity of 14.74 GiB "
    "of which 1.65 GiB is free. Process 66 has 6.79 GiB memory in use. Including non-PyTorch memory, this process has "
    "4.93 GiB memory in use. 12.00 GiB allowed; Of the allocated memory 4.50 GiB is allocated by PyTorch, with "
    "30.00 MiB allocated in private pools (e.g., CUDA Graphs), and 104.62 MiB is reserved by PyTorch but unallocated."
)
OLD = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 502.00 MiB (GPU 1; 39.59 GiB total capacity; "
    "35.54 GiB already allocated; 276.19 MiB free; 37.22 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try"
)


def message(line: str) -> memory_messages.OutOfMemory:
    found = memory_messages.read(log.read([line]).failures[0])
    assert found is not None
    return found


def test_all_numbers_of_a_message_are_read():
    new = message(NEW)
    numbers = [new.tried, new.total, new.free, new.own, new.allowed, new.allocated, new.pools, new.unused, new.others]
    assert [round(number / GIB, 3) for number in numbers] == [2.11, 14.74, 1.65, 4.93, 12.0, 4.5, 0.029, 0.102, 6.79]
    old = message(OLD)
    assert [round(number / GIB, 3) for number in (old.tried, old.total, old.free, old.allocated, old.reserved)] == [
        0.49,
        39.59,
        0.27,
        35.54,
        37.22,
    ]
    assert (old.gpu, old.own, old.processes) == (1, None, ())


def test_the_own_process_is_recognized_by_its_memory_in_a_container():
    """There, PyTorch lists its own process as one of several."""
    own = message(NEW.replace("Including non-PyTorch memory, this process has", "Process 67 has"))
    assert round(own.others / GIB, 2) == 6.79


UNEXPLAINED = "GPU 0 has a total capacity of 184.31 GiB of which 443.94 MiB is free. Of the allocated memory {} GiB is"


@pytest.mark.parametrize(
    ("allocated", "id"), [(171.63, "memory/activations-and-gradients"), (40.0, "memory/other-process")]
)
def test_memory_that_nothing_explains_is_of_others_only_if_this_process_would_fit(allocated, id):
    lines = [
        "train.py:12 step -> torch/_tensor.py:623 backward",
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 720.00 MiB. {UNEXPLAINED.format(allocated)} "
        "allocated by PyTorch, and 2.00 GiB is reserved by PyTorch but unallocated.",
    ]
    assert first(lines) == id
    assert "the backward pass" in text.text(answer.answer_lines(lines)).replace("\n ", "")


def test_a_process_that_fills_the_gpu_by_itself_makes_other_processes_less_sure():
    lines = out_of_memory(
        more="Process 7 has 76.60 GiB memory in use. Process 8 has 1.60 GiB memory in use. ", tried="1.01 GiB"
    )
    others = [cause for cause in answer.answer_lines(lines).causes if cause.id == "memory/other-process"]
    assert all(cause.sureness == "possible" for cause in others)


def test_a_size_that_a_line_before_states_is_quoted():
    lines = [
        "rank=1 pre-allocated shard.grad: 6.19 GB",
        "torch.OutOfMemoryError: Tried to allocate 6.20 GiB. GPU 2 has total 47.40 GiB of which 1.96 GiB is free.",
    ]
    found = answer.answer_lines(lines)
    assert found.cause is not None
    assert "shard.grad: 6.19 GB" in found.cause.happened
    assert "47.4 GiB" in found.cause.happened


def test_a_tensor_is_named_by_its_size_and_place():
    setting = Setting(model="qwen3-8b", micro_batch_size=2, sequence_length=4096)
    logits = 2 * 2 * 4096 * 151_936
    listed = tensors.identify(tensors.rounded(logits), "loss", setting)
    assert listed is not None
    assert listed.kind == "logits"
    assert tensors.identify(tensors.rounded(logits), "optimizer step", Setting(model="qwen3-0.6b")) is None
    assert tensors.identify(tensors.rounded(1e9), "backward", Setting()).kind == "bucket"


def test_the_gpu_is_known_by_its_memory():
    assert planned.gpu_of(round(79.14 * GIB)) == "a100-80gb"
    assert planned.gpu_of(round(139.8 * GIB)) == "h200"
    assert planned.gpu_of(5 * GIB) is None


def test_the_planner_names_changes_that_fit():
    lines = out_of_memory("transformers/modeling_utils.py:from_pretrained")
    setting = Setting(model="llama-3.1-8b", num_gpus=2, strategy="ddp", micro_batch_size=1, sequence_length=2048)
    found = answer.answer_lines(lines, setting)
    assert found.remedies
    assert all(remedy["needed_bytes_per_gpu"] < 80 * GIB for remedy in found.remedies)
    assert "Predicted to fit" in text.text(found)


def test_steps_that_are_slower_than_predicted_are_found():
    lines = [f"iter {n}: loss {falling(n + 1)}, time 90000ms" for n in range(20)]
    setting = Setting(
        model="llama-3.1-8b", gpu="h100-sxm", num_gpus=8, strategy="fsdp2", micro_batch_size=1, sequence_length=4096
    )
    assert first(lines, **dataclasses.asdict(setting)) == "slow/than-predicted"
    fast = [line.replace("90000ms", "900ms") for line in lines]
    assert first(fast, **dataclasses.asdict(setting)) is None


def test_known_faults_of_the_stated_release_are_listed():
    lines = ["deepspeed: 0.18.1", "--deepspeed ds_zero2.json", *steps(30, loss=falling, grad_norm=norms)]
    faults = answer.answer_lines(lines).faults
    assert faults
    assert all(fault.package == "deepspeed" for fault in faults)
    assert not answer.answer_lines(steps(30, loss=falling)).faults


# ---------------------------------------------------------------- what a log does not state


@pytest.mark.parametrize(
    "lines",
    [
        EXAMPLES["hang/watchdog-stuck-at-start"],
        EXAMPLES["wrong/nan-when-log-begins"],
        EXAMPLES["memory/too-large"],
        ["torch.distributed.DistBackendError: NCCL error, remote process exited or there was a network error"],
    ],
)
def test_what_happened_is_not_called_the_reason(lines):
    found = answer.answer_lines(lines)
    assert found.cause is not None
    assert found.cause.is_open
    assert found.cause.content()["is_open"] is True
    assert "does not state why" in " ".join(text.text(found).split())


def test_a_reason_that_is_open_is_never_sure():
    assert all((rule.reason or rule.certainty) == "possible" for rule in known.rules() if rule.is_open)


def test_a_nan_is_from_the_first_step_only_if_the_log_states_the_step():
    line = "loss: nan, grad_norm: nan, loss_cls: nan, loss_box: 0.5"
    assert first([f"step: 1, {line}"]) == "wrong/nan-from-the-start"
    assert first([f"step: 50, {line}"]) == "wrong/nan-when-log-begins"
    cause = answer.answer_lines([line]).cause
    assert cause is not None
    assert "loss_cls" in cause.happened
    assert "loss_box" not in cause.happened


def test_a_large_loss_of_another_model_is_no_complaint():
    """A loss above that of a guess over any vocabulary is usual for models without one, if gradients are small."""
    assert first(steps(20, loss=lambda step: 60 / step + 20, grad_norm=norms)) is None


def test_a_log_that_ends_before_the_last_step_is_no_all_clear():
    lines = [*steps(6, loss=falling, grad_norm=norms), "  0%|          | 6/175083 [00:13<107:38:12,  2.21s/it]"]
    displayed = " ".join(text.text(answer.answer_lines(lines)).split())
    assert "step 6 of 175,083" in displayed
    assert "Nothing wrong" not in displayed


def test_large_gradient_norms_are_said():
    displayed = text.text(answer.answer_lines(steps(9, loss=falling, grad_norm=lambda step: 900.5 + step)))
    assert "905.5" in displayed


def test_a_server_is_waited_for_only_at_the_end_of_a_log():
    waits = "trl.extras.vllm_client - Server is not up yet. Retrying in 2.0 seconds..."
    assert first([waits] * 3) == "hang/server-not-up"
    assert first([waits, "trl.extras.vllm_client - Server is up!"]) is None
    assert first([waits, *steps(9, loss=falling, grad_norm=norms)]) is None


def test_what_a_compiler_states_is_in_the_answer():
    cause = answer.answer_lines(
        [
            "W01 torch/_dynamo/convert_frame.py:1551] [2/8] torch._dynamo hit config.recompile_limit (8)",
            "W01 torch/_dynamo/convert_frame.py:1551] [2/8]    function: 'update' (/x/opt.py:621)",
            "W01 torch/_dynamo/convert_frame.py:1551] [2/8]    last reason: 2/7: tensor 'X[0]' size mismatch",
        ]
    ).cause
    assert cause is not None
    assert "update" in cause.happened
    assert "(8)" in cause.happened
    assert "tensor 'X[0]' size mismatch" in cause.because


# ---------------------------------------------------------------- recordings


def recording(folder: Path, rank: int, calls: Sequence[tuple[int, str, list[int], str]]) -> None:
    entries = [
        {
            "collective_seq_id": number,
            "profiling_name": f"nccl:{name}",
            "input_sizes": [size],
            "state": state,
            "is_p2p": False,
            "process_group": ("0", "default_pg"),
            "frames": [{"filename": "train.py", "line": number, "name": "f"}],
        }
        for number, name, size, state in calls
    ]
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps({"version": "2.9", "entries": entries}))


def test_recordings_show_the_first_call_that_differs(tmp_path):
    same = [(1, "all_reduce", [4096], "completed")]
    recording(tmp_path, 0, [*same, (2, "broadcast", [1], "started")])
    recording(tmp_path, 1, [*same, (2, "all_reduce", [25], "started")])
    (cause,) = recordings.flight_recordings(tmp_path)
    assert cause.id == "hang/recorded-calls"
    assert "train.py:2" in cause.happened


def test_recordings_of_equal_programs_show_the_network(tmp_path):
    for rank in range(2):
        recording(tmp_path, rank, [(1, "all_reduce", [4096], "completed"), (2, "all_reduce", [4096], "started")])
    assert [cause.id for cause in recordings.flight_recordings(tmp_path)] == ["hang/network"]


class Runs:
    def __reduce__(self):
        return (print, ("code was executed",))


@pytest.mark.parametrize(
    "content", [Runs(), [Runs()], {"entries": Runs()}, io.BytesIO(b"")], ids=["call", "list", "dict", "object"]
)
def test_a_pickle_with_more_than_plain_data_is_refused(content, tmp_path, capsys):
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(Refusal):
        recordings.snapshot(path)
    assert capsys.readouterr().out == ""


def block(size: int, state: str) -> dict[str, object]:
    return {"size": size, "state": state, "frames": [{"filename": "/x/model.py", "line": 7, "name": "forward"}]}


@pytest.mark.parametrize(("free", "id"), [(6, "memory/snapshot-fragmented"), (0, "memory/snapshot")])
def test_a_snapshot_shows_whether_memory_is_fragmented(free, id, tmp_path):
    blocks = [block(GIB, "active_allocated"), *[block(GIB // 10, "inactive") for _ in range(free)]]
    total = sum(each["size"] for each in blocks)
    content = {"segments": [{"total_size": total, "allocated_size": GIB, "blocks": blocks}], "device_traces": []}
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(content))
    (cause,) = recordings.snapshot(tmp_path / "snapshot.pickle")
    assert cause.id == id
    assert "model.py:7" in cause.happened


@pytest.mark.parametrize(
    ("share", "category", "name", "id"),
    [
        (0.5, "kernel", "ncclDevKernel_AllReduce", "slow/communication"),
        (0.4, "gpu_memcpy", "Memcpy HtoD", "slow/copies"),
        (0.0, "kernel", "", "slow/idle"),
        (0.0, "kernel", "gemm", "slow/computing"),
    ],
)
def test_a_trace_shows_where_the_time_goes(share, category, name, id, tmp_path):
    length = 1000.0
    busy = length * (1 - share) if name else length / 2
    events = [
        event
        for step in range(12)
        for event in (
            {"cat": "kernel", "name": "gemm", "ts": step * length, "dur": busy},
            {"cat": category, "name": name, "ts": step * length + busy, "dur": length * share},
        )
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert recordings.trace(tmp_path / "trace.json")[0].id == id


SEGMENT = {"total_size": 100, "allocated_size": 90, "blocks": [{"size": 90, "state": "inactive"}]}


@pytest.mark.parametrize(
    "damage",
    [{"total_size": value} for value in ("x", None, math.nan, -1, 10**5000, 1.5)]
    + [{"blocks": value} for value in (5, None, [3], [{"size": [1], "state": "inactive"}])],
    ids=lambda damage: "-".join(damage),
)
def test_a_damaged_snapshot_is_refused(damage, tmp_path):
    (tmp_path / "dump").write_bytes(pickle.dumps({"segments": [SEGMENT]}))
    assert recordings.snapshot(tmp_path / "dump")
    (tmp_path / "dump").write_bytes(pickle.dumps({"segments": [SEGMENT | damage]}))
    assert "dump" in refusal(recordings.snapshot, tmp_path / "dump")


def kernels(**damage: float) -> str:
    events = [{"cat": "kernel", "ts": number * 10, "dur": 5, **damage} for number in range(20)]
    return json.dumps({"traceEvents": events})


@pytest.mark.parametrize(
    "content",
    [
        kernels(dur=-5), kernels(dur=math.nan), kernels(ts=math.inf), kernels(ts=10**400), kernels(ts=5, dur=0),
        "[" * 100_000, gzip.compress(b" " * (1 << 24) + b"[]"),
    ],
    ids=["negative", "nan", "infinite", "huge", "no-time", "deep", "bomb"],
)  # fmt: skip
def test_a_damaged_trace_is_refused(content, tmp_path):
    (tmp_path / "trace.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert "trace.json" in refusal(recordings.trace, tmp_path / "trace.json")


def test_recordings_without_a_difference_do_not_show_the_cause(tmp_path, capsys):
    call = {"process_group": "0", "collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "completed"}
    for rank in range(2):
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"rank": rank, "entries": [call]}))
    assert cli.run(["why", "--flight-recorder", str(tmp_path)]) == 3
    assert "no difference" in capsys.readouterr().err
    (tmp_path / "rank_2").write_bytes(pickle.dumps({"rank": 1, "entries": [call]}))
    assert "rank 1" in refusal(recordings.flight_recordings, tmp_path)


# ---------------------------------------------------------------- sound trainings, and anything else


CRASHES = [
    "Segmentation fault (core dumped)", "Aborted (core dumped)", "free(): invalid pointer", "Bus error",
    "double free or corruption (!prev)", "malloc(): unaligned tcache chunk detected", "Illegal instruction",
    "Process finished with exit code 1", "srun: error: Node failure on node7", "exited with status: 139", "Killed",
    "Fatal Python error: Segmentation fault",
]  # fmt: skip


@pytest.mark.parametrize("line", CRASHES)
def test_a_log_that_ends_in_a_native_crash_is_not_sound(line):
    found = answer.answer_lines([*steps(100, loss=falling, grad_norm=norms), line])
    assert not found.is_sound
    assert found.verdict.status in (1, 3)
    assert line in text.text(found)


@pytest.mark.parametrize(
    "columns",
    [
        {"number": 2, "loss": lambda step: (1.93, 11.4)[step - 1]},
        {"number": 3, "loss": falling},
        {"number": 9, "loss": falling, "learning_rate": lambda step: 0.0, "grad_norm": lambda step: 0.0},
        {"number": 9, "loss": lambda step: 1.0 + step},
    ],
    ids=["risen", "few", "zero", "rising"],
)
def test_numbers_that_show_no_sound_training(columns):
    assert answer.answer_lines(steps(columns.pop("number"), **columns)).verdict.status in (1, 3)


def test_a_sound_training_is_sound_and_says_what_was_not_checked():
    lines = steps(200, loss=falling, grad_norm=norms, learning_rate=lambda step: (200 - step) * 1e-6)
    found = answer.answer_lines(lines)
    assert found.is_sound
    assert found.verdict.status == 0


def test_the_time_of_a_step_is_said_if_the_setting_is_unknown():
    lines = [f"iter {n}: loss {falling(n + 1)}, time 2500ms" for n in range(20)]
    assert "2.5 s" in text.text(answer.answer_lines(lines))


@pytest.mark.parametrize("path", sorted((CASES / "sound").glob("*.log")), ids=lambda path: path.stem)
def test_a_sound_training_of_others_gets_no_complaint(path):
    assert not answer.answer([path]).num_found


def test_an_unknown_failure_is_unknown_and_shows_its_lines():
    found = answer.answer_lines(
        ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "FrobError: no frob"]
    )
    assert (found.cause, found.verdict.status) == (None, 3)
    assert "FrobError: no frob" in text.text(found)


def test_secrets_are_masked():
    secret = "hf_" + "A" * 30
    line = f"OSError: 401 Client Error for token={secret} https://user:{'p' * 16}@host/x api_key: {'k' * 20}"
    displayed = text.text(answer.answer_lines([line])) + json.dumps(answer.content(answer.answer_lines([line])))
    assert not any(word in displayed for word in (secret, "p" * 16, "k" * 20))


PIECES = [
    *(line for lines in EXAMPLES.values() for line in lines[:3]),
    "[rank1]:",
    "\x1b[31mError",
    "\r",
    "Traceback (most",
    "│ x │",
    '  File "',
    "100%|██| 5/5 [00:0",
    "nan",
    "{'loss': ",
    "OVERFLOW! loss scale: 1e999",
    "\u202e",
    "Tried to allocate 9e9 GiB",
]


@given(
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=40)), max_size=12), st.randoms(use_true_random=False)
)
def test_any_text_gets_an_answer(pieces, drawn: random.Random):
    whole = drawn.choice(["\n", "", " "]).join(pieces) or "x"
    found = answer.answer_lines(whole.split("\n"))
    displayed = text.text(found)
    assert displayed.replace("\n", "").isprintable()
    json.dumps(answer.content(found))


def test_any_bytes_get_an_answer(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(random.Random(2).randbytes(200_000))
    assert answer.answer([path]).verdict.status in (0, 1, 3)


def test_a_long_log_needs_little_memory(tmp_path):
    import tracemalloc

    path = tmp_path / "log"
    line = "Error: {'loss': 1.5, 'grad_norm': 2.0} " + "x" * 200 + "\n"
    path.write_text(line * 40_000)  # 10 MB
    tracemalloc.start()
    answer.answer([path])
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()


def test_the_rows_of_a_long_log_are_its_first_and_last_ones():
    lines = steps(30_000, loss=lambda step: float(step), step=lambda step: step)
    rows = answer.answer_lines(lines).steps.rows
    assert [int(row.loss) for row in rows[:2000]] == list(range(1, 2001))
    assert [int(row.loss) for row in rows[-2000:]] == list(range(28_001, 30_001))


def test_a_loss_that_becomes_nan_late_in_a_long_log_is_found():
    lines = [*steps(20_000, loss=falling), "{'loss': nan}", *steps(6000, loss=falling)]
    assert first(lines) == "wrong/diverged"


def test_a_failure_is_found_in_lines_that_were_seen_before_with_other_digits():
    lines = [f"[rank{n % 2}]: loading shard {n}" for n in range(50)]
    lines += ["[rank1]: Traceback (most recent call last):", '[rank1]:   File "/x/t.py", line 3, in f', "[rank1]: Frob"]
    (failure,) = log.read(lines).failures
    assert (failure.kind, failure.rank) == ("Frob", 1)


def test_words_of_a_pattern_are_in_each_text_that_it_matches():
    for rule in known.rules():
        if rule.match is not None and (match := re.search(rule.match, rule.example)):
            words = known.words_of(rule.match)
            assert not words or any(word in match[0].lower() for word in words), rule.id


# ---------------------------------------------------------------- the command


def test_the_command_reads_a_file_and_prints_json(tmp_path, capsys):
    path = tmp_path / "log"
    path.write_text("\n".join(EXAMPLES["memory/logits"]))
    assert cli.run(["why", str(path), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["cause"]["id"] == "memory/logits"
    assert content["verdict"] == "found"
    assert cli.run(["why", str(path)]) == 1
    assert "What to change" in capsys.readouterr().out


def test_an_unknown_strategy_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_text("step: 1 loss: 1.5")
    with pytest.raises(Refusal, match="zero9"):
        cli.run(["why", str(path), "--strategy", "zero9"])


def test_an_empty_log_is_refused(tmp_path):
    (tmp_path / "log").touch()
    with pytest.raises(Refusal):
        cli.run(["why", str(tmp_path / "log")])


def test_a_cause_is_listed_once_and_consequences_last():
    from zero_study.why.cause import rank_causes

    one = Cause("a", "hang", "", "", "certain", "", is_consequence=True)
    two = Cause("b", "hang", "", "", "possible", "")
    assert [cause.id for cause in rank_causes([one, two, two])] == ["b", "a"]


# ---------------------------------------------------------------- memory without numbers, data, and ranks


def test_a_message_about_memory_without_its_numbers_is_explained_by_its_phase():
    lines = out_of_memory("torch/optim/adamw.py:_init_group")
    lines[-1] = "torch.OutOfMemoryError: CUDA out of memory."
    found = answer.answer_lines(lines)
    assert found.cause is not None
    assert found.cause.id == "memory/optimizer-states"
    assert "0 bytes" not in found.cause.happened
    assert first("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.") != (
        "memory/too-large"
    )


@pytest.mark.parametrize(("wait", "is_cause"), [(0.05, False), (1.5, True)])
def test_waiting_for_data_is_a_cause_if_it_takes_much_of_the_time(wait: float, is_cause: bool):
    lines = [f"Epoch [1][{step}/90] loss: {3 / step:.4f} time: {wait + 0.4} data_time: {wait}" for step in range(1, 30)]
    assert (first(lines) == "slow/waiting-for-data") == is_cause


def test_the_first_steps_may_wait_for_the_workers_to_start():
    waits = {1: 60.0, 2: 20.0}
    lines = [f"step:{step} loss:{3 / step:.4f} updt_s:0.302 data_s:{waits.get(step, 0.001)}" for step in range(1, 30)]
    assert answer.answer_lines(lines).is_sound


def test_a_rank_that_the_log_does_not_quote_is_not_called_absent():
    line = (
        "[rank{0}]:[E1002 16:04:30.86 ProcessGroupNCCL.cpp:2252] [PG ID 1 PG GUID 1 Rank {0}]  failure detected by "
        "watchdog at work sequence id: 1116 PG status: last enqueued work: 1118, last completed work: 1115"
    )
    found = answer.answer_lines([line.format(1), line.format(2)])
    assert found.cause is not None
    assert found.cause.is_open
    assert "1,116" in found.cause.happened
