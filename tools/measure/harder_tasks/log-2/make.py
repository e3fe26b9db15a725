"""Write train.log of eight ranks of which one has one batch less per epoch: python make.py.

The lines have the format of torch's NCCL watchdog; the log was not printed by a run on GPUs.
"""

from pathlib import Path

RANKS, BATCH, SHORT, ROWS, SHORT_ROWS = 8, 32, 5, 20_832, 20_809
STEPS = ROWS // BATCH  # 651; rank 5 has 650, because the last incomplete batch is dropped
GRADIENTS = 26_214_400
BUCKETS = 4

lines = ["[rank0] DataLoader(batch_size=32, drop_last=True, num_workers=4), model parameters: 84,934,656, DDP"]
for rank in (3, 0, 6, 5, 1, 7, 2, 4):
    lines.append(f"[rank{rank}] rows of this shard: {SHORT_ROWS if rank == SHORT else ROWS:,}")
for step in range(50, 651, 50):
    milliseconds = 412 + step * 7 % 13
    lines.append(f"[rank0] epoch 0 step {step} loss {2.9 + 3 / step**0.5:.4f} lr 3.00e-04 {milliseconds} ms/step")
sequence = STEPS * (BUCKETS + 1) - BUCKETS  # the first bucket of the last step
for rank in (2, 5, 0, 7, 1, 4, 6, 3):
    wait = 600_000 + 11 * rank + 27
    what = (
        "ALLGATHER, NumelIn=1, NumelOut=8" if rank == SHORT else f"ALLREDUCE, NumelIn={GRADIENTS}, NumelOut={GRADIENTS}"
    )
    lines.append(
        f"[rank{rank}]:[E1128 03:1{rank % 3}:27.4{rank}1093 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum={sequence}, OpType={what}, Timeout(ms)=600000) ran for "
        f"{wait} milliseconds before timing out."
    )
    lines.append(
        f"[rank{rank}]:[E1128 03:1{rank % 3}:27.4{rank}1288 ProcessGroupNCCL.cpp:2252] "
        f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure detected by watchdog at "
        f"work sequence id: {sequence} PG status: last enqueued work: "
        f"{sequence + (0 if rank == SHORT else 3)}, last completed work: {sequence - 1}"
    )
lines.append(
    "[rank0]: torch.distributed.DistBackendError: NCCL Collective operation timed out. Some NCCL operations have "
    "failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on "
    "corrupted/incomplete data. To avoid data inconsistency, we are taking the entire process down."
)
lines.append(
    "E1128 03:13:02.118 torch/distributed/elastic/multiprocessing/api.py:906] failed "
    "(exitcode: -6) local_rank: 2 (pid: 71934)"
)
(Path(__file__).parent / "train.log").write_text("\n".join(lines) + "\n")
