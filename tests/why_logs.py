"""Logs with which `zero-study why` is tested, and what it must and must not state about them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from zero_study.terminal import GIB
from zero_study.why import tensors


def steps(count: int, **columns: Callable[[int], object]) -> list[str]:
    """Return what Trainer prints for steps."""
    return [str({name: value(step) for name, value in columns.items()}) for step in range(1, count + 1)]


def falling(step: int) -> float:
    return round(3 / math.sqrt(step) + 0.01 * math.sin(step), 4)


SOUND = steps(30, loss=falling, grad_norm=lambda step: round(1 + 0.1 * math.sin(step), 4))
PACKAGES = "/env/lib/python3.11/site-packages"
Code = tuple[str, int, str, str]  # a frame: file, line, function and code


def raised(error: str, *frames: Code) -> list[str]:
    """Return a traceback that ends with an exception."""
    lines = [(f'  File "{file}", line {line}, in {function}', f"    {code}") for file, line, function, code in frames]
    return ["Traceback (most recent call last):", *(each for pair in lines for each in pair), error]


STEP: Code = ("/work/train.py", 12, "step", "loss.backward()")
BACKWARD: Code = (f"{PACKAGES}/torch/_tensor.py", 99, "backward", "torch.autograd.backward(self)")
TRACEBACK = raised("ValueError: a broken sample", STEP, BACKWARD)
KEY = raised("KeyError: 'loss'", ("/work/data.py", 7, "load", "return row['loss']"))
WATCHDOG = (
    "[rank{0}]:[E1218 12:49:09.0865 ProcessGroupNCCL.cpp:616] {4}[Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={1}, OpType={2}, NumelIn={3}, NumelOut={3}, Timeout(ms)=1800000) ran for 1800046 ms."
)
GROUP = "[PG ID {0} PG GUID {0} Rank {1}] Process group watchdog thread terminated with exception: "


def of_rank(rank: int, *lines: str) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in lines]


def waiting(*calls: tuple[int, int, str, int], groups: str = "") -> list[str]:
    """Return lines of watchdogs, of rank, number, operation and size. `groups` has a digit for each process group."""
    stated = [GROUP.format(group, call[0]) for group, call in zip(groups, calls, strict=False)] or [""] * len(calls)
    return [WATCHDOG.format(*call, group) for call, group in zip(calls, stated, strict=True)]


# ---------------------------------------------------------------- prefixes, and failures

# A prefix and the rank that it states. ## is a number that differs between lines.
PREFIXES: dict[str, tuple[str, int | None]] = {
    "host": ("gpu01: ", None), "address": ("10.0.0.7: ", None), "host-of-aws": ("ip-10-0-0-1: ", None),
    "pdsh": ("gpu-node-07.cluster: ", None), "kubectl": ("[pod/train-worker-0/pytorch] ", None),
    "docker-compose": ("trainer-1  | ", None), "journald": ("Nov 30 11:59:## gpu01 train.sh[4242]: ", None),
    "cri": ("2026-11-30T11:59:##.123456789Z stderr F ", None), "ray": ("(TrainWorker pid=4242, ip=10.0.0.7) ", None),
    "ray-with-colors": ("\x1b[36m(WorkerDict pid=4242)\x1b[0m ", None), "torchrun-tee": ("[default3]:", 3),
    "pytorch": ("[rank3]: ", 3), "mpirun": ("[1,3]<stderr>:", 3), "srun": ("3: ", 3),
    "date-and-rank": ("2026-11-30T11:59:##.950901628Z [rank3]: ", 3),
    "logger": ("2026-11-30 11:59:##,123 - trainer - ERROR - ", None), "logger-with-a-level": ("ERROR:trainer: ", None),
    "logger-of-hydra": ("[2026-11-30 11:59:##,123][trainer][ERROR] - ", None),
    "glog": ("E1130 11:59:##.123456 4242 train.py:12] ", None),
}  # fmt: skip

CAUSE = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"

CONSEQUENCES = {
    "connection": of_rank(0, "RuntimeError: Connection closed by peer [127.0.0.1]:45021"),
    "nccl": of_rank(0, "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: remote process exited"),
    "time-out": waiting((0, 51, "ALLREDUCE", 4096)),
    "torchrun": ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py", "exitcode  : -15"],
    "launcher": ["subprocess.CalledProcessError: Command '['torchrun']' returned non-zero exit status 1."],
    "ray": ["ray.exceptions.RayTaskError(ValueError): ray::run() (pid=12, ip=10.0.0.1)"],
    "closing-signal": ["E1130 torch/distributed/elastic/api.py:882] Sending process 12 closing signal SIGTERM"],
}

REPORT = """Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_11:59:01
  host      : gpu01
  rank      : 5 (local_rank: 1)
  exitcode  : {} (pid: 4242)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"""

# What a system, a launcher or a scheduler prints if a signal ended a process, and whether it is about the memory.
CRASHES = {
    "Segmentation fault (core dumped)": ("SIGSEGV", False), "Aborted (core dumped)": ("SIGABRT", False),
    "Bus error (core dumped)": ("SIGBUS", False), "Illegal instruction (core dumped)": ("SIGILL", False),
    "Floating point exception (core dumped)": ("SIGFPE", False), "free(): invalid pointer": ("SIGABRT", False),
    "double free or corruption (!prev)": ("SIGABRT", False), "Killed": ("SIGKILL", False),
    "malloc(): unaligned tcache chunk detected": ("SIGABRT", False),
    "terminate called after throwing an instance of 'std::bad_alloc'": ("SIGABRT", False),
    "/var/spool/slurmd/job123/slurm_script: line 12: 4242 Killed                  python train.py": ("SIGKILL", False),
    "[INFO] [launch.py:347:main] Process 212 exits with return code = -11": ("SIGSEGV", False),
    "[E1130 torch/distributed/elastic/api.py:1] failed (exitcode: -9) local_rank: 1 (pid: 9)": ("SIGKILL", False),
    "Process finished with exit code 134": ("SIGABRT", False), "Command exited with exit code 137": ("SIGKILL", False),
    "srun: error: gpu01: task 3: Exited with exit code 139": ("SIGSEGV", False),
    "Fatal Python error: Segmentation fault": ("SIGSEGV", False),
    "Out of memory: Killed process 4242 (python) total-vm:912345kB, anon-rss:51234kB": ("SIGKILL", True),
    "oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=4242": ("SIGKILL", True),
    "slurmstepd: error: Detected 1 oom_kill event. Some of the step tasks have been OOM Killed.": ("SIGKILL", True),
}  # fmt: skip

# ---------------------------------------------------------------- arithmetic

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.25 GiB of "
    "which 1.00 GiB is free. {more}Of the allocated memory 76.00 GiB is allocated by PyTorch, {pools}and {unused} is "
    "reserved by PyTorch but unallocated."
)
LOSS: Code = (f"{PACKAGES}/transformers/loss/loss_utils.py", 36, "fixed_cross_entropy", "return cross_entropy(x)")
OPTIMIZER: Code = (f"{PACKAGES}/torch/optim/adamw.py", 99, "_init_group", "exp_avg = torch.zeros_like(p)")
OTHERS = "Process 7 has {} memory in use. Including non-PyTorch memory, this process has 61.00 GiB memory in use. "
NO_OWN = "Process 7 has 17.00 GiB memory in use. Process 8 has 61.00 GiB memory in use. "
QWEN: dict[str, Any] = {"model": "qwen3-8b", "micro_batch_size": 3, "sequence_length": 4096}
LOGITS = f"{tensors.rounded(2 * 3 * 4096 * 151_936) / GIB:.2f} GiB"  # in 16 bits
BAR = "Tokenizing (num_proc=8):  92%|████| 328986/359152 [29:58<12:05, 41.59 examples/s]"
STORE = "[rank1]: DistStoreError: wait timeout after 1800000ms, keys: /default_pg/0/store_based_barrier_key:1"
QUEUED = (
    "[rank{0}]:[E918 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank {0}]  failure detected by watchdog "
    "at work sequence id: {1} PG status: last enqueued work: {2}, last completed work: {3}"
)
WRAPPED = ["[Rank 0] Watchdog caught collective operation timeout:",
           "  WorkNCCL(..., OpType=ALLREDUCE, NumelIn=12, NumelOut=12, Timeout(ms)=1800000)"]  # fmt: skip
RECOMPUTED = (
    "CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than "
    "during the forward pass. tensor at position 3: saved metadata: {{'shape': torch.Size([2, 8]), 'dtype': "
    "torch.bfloat16}} recomputed metadata: {{'shape': torch.Size([2, 8]), 'dtype': torch.{}}}"
)
BATCH = (
    "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
    "gradient_acc_step * world_size 64 != 4 * 2 * 1"
)
ORDINAL = "RuntimeError: CUDA error: invalid device ordinal"
BUILD = ["NVIDIA B200 with CUDA capability sm_100 is not compatible with the current PyTorch installation.",
         "The current PyTorch install supports CUDA capabilities sm_50 sm_80 sm_90."]  # fmt: skip
NETWORK = ["NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0"] * 3 + ["NCCL INFO Using network IB"]
MEMORY = "(raylet) The node has 1.2 GB of available memory"
RAYLET = "(raylet) node_manager.cc:3100: 1 Workers (tasks / actors) killed due to memory pressure (OOM)"


def full(*frames: Code, **values: str) -> list[str]:
    """Return a traceback that ends with PyTorch's message that a GPU has no memory left."""
    usual = {"tried": "1.50 GiB", "more": "", "pools": "", "unused": "0.25 GiB"}
    return raised(OUT_OF_MEMORY.format_map(usual | values), *frames)


OTHER_KIND = ((0, 9, "BROADCAST", 64), (1, 9, "ALLREDUCE", 4096))
OTHER_SIZE = ((0, 9, "BROADCAST", 64), (1, 9, "BROADCAST", 4096))
OTHER_NUMBER = ((0, 959, "ALLREDUCE", 544_997_376), (1, 963, "ALLREDUCE", 2560))

# The id of a fact, the log, the settings, numbers that the fact states, and whether they show the cause.
FACTS: list[tuple[str, list[str], dict[str, Any], list[str], bool]] = [
    ("memory/request", [*steps(9, loss=falling, **{"memory(GiB)": lambda step: 40.5 + step}), *full(LOSS)], {},
     ["1.5 GiB", "79.2 GiB", "1 GiB", "76 GiB", "256 MiB", "512 MiB", "49.5 GiB", "9 steps"], False),
    ("memory/other-process", full(LOSS, more=OTHERS.format("17.00 GiB")), {}, ["17 GiB", "512 MiB"], True),
    ("memory/fragmentation", full(LOSS, unused="1.51 GiB"), {}, ["1.5 GiB", "1.51 GiB"], True),
    ("memory/tensor", full(LOSS, tried=LOGITS), QWEN, ["the logits", "16 bits"], False),
    ("memory/tokens", ["vocab_size: 152064", *full(LOSS)], {},
     ["152,064", f"{1.5 * GIB / 4 / 152_064:,.0f} tokens"], False),
    ("hang/waiting", ["[rank2]: x", *waiting(*((rank, 517, "ALLREDUCE", 11_718_912) for rank in (0, 1, 4)))], {},
     ["Ranks 0, 1, 4", "30 minutes", "517", "ALLREDUCE", "11,718,912", "rank 2", "rank 3"], False),
    ("hang/waiting", WRAPPED, {}, ["Rank 0", "30 minutes", "ALLREDUCE", "12 elements"], False),
    ("hang/waiting", [QUEUED.format(1, 1116, 1118, 1115), QUEUED.format(2, 1116, 1118, 1115)], {},
     ["Ranks 1, 2", "1,116"], False),
    ("hang/waiting", waiting((0, 9, "ALLTOALL_BASE", 64), (1, 9, "ALLTOALL_BASE", 4096), groups="00"), {},
     ["Ranks 0, 1"], False),
    ("hang/waiting", waiting((0, 9, "_ALLGATHER_BASE", 64), (1, 9, "ALLGATHER_BASE", 64)), {}, ["Ranks 0, 1"], False),
    ("hang/waiting", waiting(*OTHER_KIND, groups="01"), {}, ["64 ", "4,096"], False),
    ("hang/waiting", waiting(*OTHER_NUMBER, groups="01"), {}, ["959", "963"], False),
    ("hang/different-calls", waiting(*OTHER_KIND, groups="00"), {}, ["BROADCAST", "64 ", "ALLREDUCE", "4,096"], True),
    ("hang/different-calls", waiting(*OTHER_SIZE, (2, 11, "ALLREDUCE", 1), groups="000"), {},
     ["64 ", "4,096", "number 11"], True),
    ("hang/different-calls", waiting(*OTHER_KIND), {}, ["BROADCAST", "ALLREDUCE"], False),  # the group is not stated
    ("hang/rank-behind", waiting(*OTHER_NUMBER, groups="00"), {},
     ["Rank 0", "959", "963", "544,997,376", "2,560"], False),
    ("hang/rank-behind", [*waiting((0, 71, "ALLREDUCE", 4096), (1, 72, "BROADCAST", 64)), QUEUED.format(0, 71, 90, 70),
                          QUEUED.format(1, 72, 72, 71)], {}, ["Rank 0", "71", "72", "90", "70"], False),
    ("hang/preparation", [BAR, *waiting((1, 1, "ALLREDUCE", 1))], {}, ["328,986", "359,152"], False),
    ("hang/preparation", [BAR, STORE], {}, ["328,986", "359,152"], False),
    ("launch/signal", ["Segmentation fault (core dumped)"], {}, ["11"], False),
    ("start-up/recomputed-types", [RECOMPUTED.format("float32")], {}, ["torch.bfloat16", "torch.float32", "1 "], True),
    ("start-up/batch-product", [BATCH], {}, ["4 x 2 x 1 = 8", "64"], False),
    ("start-up/batch-product", ["--nproc_per_node=4", BATCH], {}, ["4 x 2 x 1 = 8", "64"], False),
    ("start-up/batch-product", ["--nproc_per_node=8", BATCH], {}, ["4 x 2 x 1 = 8", "64", "8 processes"], True),
    ("start-up/gpu-architecture", BUILD, {}, ["NVIDIA B200", "sm_50, sm_80, sm_90", "sm_100"], True),
    ("start-up/gpu-architecture", BUILD[:1], {}, ["sm_100"], False),
]  # fmt: skip
# Logs from which a fact does not follow.
NOTHING: list[tuple[str, list[str], dict[str, Any]]] = [
    ("memory/other-process", full(LOSS, more=OTHERS.format("0.25 GiB")), {}),  # 0.5 GiB were missing
    ("memory/other-process", full(LOSS, more=NO_OWN), {}),  # which one is this process is unknown
    ("memory/fragmentation", full(LOSS, unused="1.50 GiB"), {}),
    ("memory/fragmentation", full(LOSS, unused="9.00 GiB", pools="with 9.00 GiB allocated in private pools "), {}),
    ("memory/tensor", full(OPTIMIZER, tried=LOGITS), QWEN),
    ("memory/tensor", full(LOSS, tried="2.75 GiB"), QWEN),
    ("memory/tensor", full(LOSS, tried=LOGITS), {}),
    ("memory/tokens", full(LOSS), {}),
    ("memory/tokens", ["vocab_size: 152064", *full(OPTIMIZER)], {}),
    ("hang/different-calls", waiting(*OTHER_KIND, groups="01"), {}),
    ("hang/rank-behind", waiting(*OTHER_NUMBER, groups="01"), {}),
    ("hang/preparation", [*SOUND, BAR, *waiting((1, 1, "ALLREDUCE", 1))], {}),
    ("hang/preparation", [BAR.replace("328986/", "359152/"), *waiting((1, 1, "ALLREDUCE", 1))], {}),
    ("hang/preparation", [BAR], {}),
    ("launch/signal", TRACEBACK, {}),
    ("start-up/recomputed-types", [RECOMPUTED.format("bfloat16")], {}),
    ("start-up/batch-product", [BATCH.replace("64 != 4 * 2 * 1", "")], {}),
    ("start-up/gpu-architecture", BUILD[1:], {}),
    ("slow/transport", SOUND, {}),
]  # fmt: skip

# A known fault of deepspeed 0.17.2 to 0.17.4.
IN_WAIT: Code = (f"{PACKAGES}/deepspeed/runtime/zero/partition_parameters.py", 99, "wait", "assert self.is_inflight")
FAULT = "AssertionError: expected param {'id': 685, 'status': 'AVAILABLE'} to be inflight"


# ---------------------------------------------------------------- answers

RISING = steps(9, loss=lambda step: 1.0 + step)
STATUSES = [(TRACEBACK, 1), ([*SOUND, "Killed"], 1), (RISING, 1), (SOUND, 0), (SOUND[:3], 3), (["loading"], 3)]
ILLEGAL = ["RuntimeError: CUDA error: an illegal memory access was encountered"]
# Logs without their cause. In the first one, a frame shows where to look.
WITHOUT_CAUSE = [
    TRACEBACK, ["Killed"], waiting((0, 9, "BROADCAST", 64)), full(LOSS), TRACEBACK[:-1], SOUND[:2], ILLEGAL,
    ["KeyError: 'x'"], RISING,
]  # fmt: skip


# ---------------------------------------------------------------- what may be in any log

SECRETS = {
    "--password hunter2": "hunter2",
    "--password=hunter2": "hunter2",
    '--db-password "hunter2"': "hunter2",
    "PASSWORD=hunter2": "hunter2",
    "token=hf_" + "A" * 30: "A" * 30,
    "key sk-proj-" + "B" * 30: "B" * 30,
    "https://user:hunter2pass@host/x": "hunter2pass",
    "api_key: " + "k" * 20: "k" * 20,
    "Authorization: Bearer " + "t" * 20: "t" * 20,
}

PIECES = [
    *TRACEBACK[:4], *REPORT.split("\n"), *list(CRASHES)[:6], *waiting((0, 9, "BROADCAST", 64)), *full(LOSS)[-1:],
    BAR, BATCH, CAUSE, HANDLING, RECOMPUTED, *SOUND[:2], "[rank1]:", "\x1b[31mError", "\r", "Traceback (most",
    "│ x │", '  File "', "nan", "{'loss': ", "100%|██| 5/5 [00:0", "OVERFLOW! loss scale: 1e999", "\u202e",
    "Tried to allocate 9e9 GiB", "exitcode: -64",
]  # fmt: skip

LONG = ["Error: {'loss': 1.5, 'grad_norm': 2.0} " + "x" * 200 + "\n", "x" * 256, f"ValueError: no\n{'y' * 230}\n"]
