"""Does a flag or a variable that a run may have change what is trained? Each is launched, beside a run without it.

    python tools/soak_launcher_flags.py [FOLDER]

Prints the table of `docs/launcher.md`: two steps of the tiny model on two processes, under three strategies; what is to
be refused under the first of them. Some ten minutes on two quiet cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from study.records import schema  # noqa: E402

STRATEGIES = ("ddp", "zero2", "fsdp2")
PROGRAM = ["--max-steps", "2", "--num-train-examples", "64", "--num-eval-examples", "16", "--no-measure"]
# What is added to the launcher's command, and to its environment.
ACCEPTED = [
    "",
    "--num_processes 2",
    "--num_machines 1",
    "--machine_rank 0",
    "--main_process_ip 127.0.0.1",
    "--same_network",
    "--main_process_port 29713",
    "--rdzv_backend c10d --rdzv_conf timeout=600",
    "--gpu_ids all --num_cpu_threads_per_process 1 --role trainer --monitor_interval 0.5",
    "--quiet --debug --log_dir LOGS --tee 3",
    "ACCELERATE_LOG_LEVEL=INFO ACCELERATE_DEBUG_MODE=true TORCHDYNAMO_VERBOSE=1 TORCHINDUCTOR_COMPILE_THREADS=1",
    "DS_ACCELERATOR=cpu DS_SKIP_CUDA_CHECK=1 DEEPSPEED_TIMEOUT=20",
]
REFUSED = [
    "--mixed_precision bf16",
    "--dynamo_backend inductor",
    "--fsdp_activation_checkpointing true",
    "ACCELERATE_MIXED_PRECISION=bf16",
    "FSDP_ACTIVATION_CHECKPOINTING=true",
    "PARALLELISM_CONFIG_CP_SIZE=2",
    "MEGATRON_LM_TP_DEGREE=2",
    "DS_PIN_MEMORY_BACKEND=torch",
    "DEEPSPEED_USE_HPU=1",
    "TORCHDYNAMO_DISABLE=1",
    "TORCHINDUCTOR_MAX_AUTOTUNE=1",
    "TORCH_COMPILE_DISABLE=1",
]


def attempt(strategy: str, added: str, folder: Path) -> str:
    """What came of one launch: its losses and the digest of its weights, or that it was refused."""
    words = added.replace("LOGS", str(folder / "logs")).split()
    flags = words if added.startswith("-") else []
    variables = {} if flags else dict(word.split("=", 1) for word in words)
    port = [] if "--main_process_port" in flags else ["--main_process_port", "0"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    config_file = f"accelerate_configs/{strategy}.yaml"
    command = [*launcher, config_file, *port, *flags, "study/train.py", *PROGRAM, "--output-dir", str(folder / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    if (folder / "run" / "record.json").exists():
        record = schema.read(folder / "run")
        losses = [line["loss"] for line in schema.read_steps(folder / "run")]
        return f"{record.status} {losses} {record.final_parameters and record.final_parameters.sha256}"
    refused = [line for line in done.stderr.splitlines() if line.startswith("zero-study: ")]
    return "refused" if refused and not (folder / "run").exists() else f"exit status {done.returncode}"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    print(f"| added to the launch | {' | '.join(STRATEGIES)} |\n| --- |{' --- |' * len(STRATEGIES)}", flush=True)
    plain: dict[str, str] = {}
    for number, added in enumerate([*ACCEPTED, *REFUSED]):
        cells = []
        for strategy in STRATEGIES if added in ACCEPTED else STRATEGIES[:1]:
            came = attempt(strategy, added, folder / f"{number}-{strategy}")
            same = plain.setdefault(strategy, came) == came and came.startswith("ok")
            cells.append("bit-identical" if same and number else "trained" if same else came)
        cells += ["not tried"] * (len(STRATEGIES) - len(cells))
        print(f"| `{added or 'nothing'}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
