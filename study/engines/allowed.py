"""Which of the launcher's flags and of the environment's variables may a run have, and what proves what they did?

A run is its strategy's file and its own flags. What else `accelerate launch` and the libraries would take from a
command line or from the environment is refused by name, unless it changes no result, or the record proves what came of
it.
`docs/launcher.md` is this module as a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from study.errors import Refusal


class Rule(NamedTuple):
    """What becomes of a flag or a variable."""

    is_accepted: bool
    why: str  # accepted: what proves it; refused: what it would do, and the remedy


def _accepted(proof: str) -> Rule:
    return Rule(True, proof)


def _refused(why: str) -> Rule:
    return Rule(False, why)


_IN_THE_FILE = "is said in the strategy's file, which alone says how a run is distributed; write it there"
_RUNS_OWN = "is the run's own; remove it, and pass {} to the program"
_NO_PART = "is no part of any run of the study; remove it"
_RANKS = "`proof.world_size`: every rank came up"
_PRINTS = "nothing to prove: it changes what is printed, or where"

# By the launcher's own names; the first pattern that fits decides.
FLAGS: dict[str, Rule] = {
    "config_file": _accepted("`strategy_file` and the whole `proof`"),
    "num_processes": _accepted(_RANKS),
    "num_machines": _accepted(_RANKS),
    "machine_rank": _accepted(_RANKS),
    "main_process_ip": _accepted(_RANKS),
    "main_process_port": _accepted(_RANKS),
    "same_network": _accepted(_RANKS),
    "rdzv_backend": _accepted(_RANKS),
    "rdzv_conf": _accepted(_RANKS),
    "gpu_ids": _accepted("`proof.num_gpus`, and CUDA_VISIBLE_DEVICES in `machine.environment`"),
    "num_cpu_threads_per_process": _accepted("`machine.num_threads_per_process`"),
    "quiet": _accepted(_PRINTS),
    "debug": _accepted("nothing to prove: accelerate checks shapes when it gathers, which is outside every step"),
    "tee": _accepted(_PRINTS),
    "log_dir": _accepted(_PRINTS),
    "role": _accepted(_PRINTS),
    "monitor_interval": _accepted("nothing to prove: how often torchrun looks at its ranks"),
    "help": _accepted("nothing to prove: it prints the help and starts nothing"),
    "cpu": _refused("turns every strategy into plain DDP; remove it, for a box without a GPU takes the CPU anyway"),
    "mixed_precision": _refused(_RUNS_OWN.format("--precision")),
    "downcast_bf16": _refused(_RUNS_OWN.format("--precision")),
    "fp8_*": _refused(_NO_PART),
    "dynamo_*": _refused(_RUNS_OWN.format("--compile")),
    "gradient_accumulation_steps": _refused(_RUNS_OWN.format("--micro-batch-size")),
    "gradient_clipping": _refused(_RUNS_OWN.format("--gradient-clipping")),
    "offload_*_nvme_path": _refused(_RUNS_OWN.format("--swap-dir")),
    "enable_cpu_affinity": _refused(_IN_THE_FILE),
    "max_restarts": _refused("would start a run again in the folder of the one that failed; remove it"),
    "module": _refused("starts another program than study/train.py; name that file"),
    "no_python": _refused("starts another program than study/train.py; name that file"),
    "env": _refused("is for a TPU; set variables before the launch"),
    "use_megatron_lm": _refused(_NO_PART),
    "multi_gpu": _refused(_IN_THE_FILE),
    "use_*": _refused(_IN_THE_FILE),
    "zero_stage": _refused(_IN_THE_FILE),
    "zero3_*": _refused(_IN_THE_FILE),
    "offload_*": _refused(_IN_THE_FILE),
    "deepspeed_*": _refused(_IN_THE_FILE),
    "fsdp_*": _refused(_IN_THE_FILE),
    "parallelism_config_*": _refused(_IN_THE_FILE),
    "megatron_lm_*": _refused(_NO_PART),
    "tpu*": _refused(_NO_PART),
    "vm": _refused(_NO_PART),
    "main_training_function": _refused(_NO_PART),
    "aws_*": _refused(_NO_PART),
    "mpirun_hostfile": _refused(_NO_PART),
}

_RECORDED = "`machine.environment` keeps its value"
_BUILDS = f"it is about building an extension; {_RECORDED}"

# The families that change a run behind its configuration. What the launcher itself sets, from the strategy's file, is
# not among what is asked: only what the launcher was started with is.
VARIABLES: dict[str, Rule] = {
    "ACCELERATE_LOG_LEVEL": _accepted(_PRINTS),
    "ACCELERATE_*ABLE_RICH": _accepted(_PRINTS),
    "ACCELERATE_DEBUG_MODE": FLAGS["debug"],
    "ACCELERATE_*": _refused("accelerate takes it for a part of the strategy's file, or of the run; unset it"),
    "FSDP_*": _refused("accelerate takes it for a part of fsdp_config; unset it, and write that in the file"),
    "PARALLELISM_CONFIG_*": _refused("accelerate takes it for a mesh; unset it, and write that in the file"),
    "MEGATRON_LM_*": _refused("is no part of any run of the study; unset it"),
    "DS_ACCELERATOR": _accepted("`proof.device`"),
    "DS_SKIP_CUDA_CHECK": _accepted(_BUILDS),
    "DS_IGNORE_CUDA_DETECTION": _accepted(_BUILDS),
    "DS_BUILD_*": _accepted(_BUILDS),
    "DS_NVCC_THREADS": _accepted(_BUILDS),
    "DS_DEBUG_CUDA_BUILD": _accepted(_BUILDS),
    "DS_*": _refused("DeepSpeed then runs otherwise than its configuration says; unset it"),
    "DEEPSPEED_TIMEOUT": _accepted(f"how long a collective may take, not what it does; {_RECORDED}"),
    "DEEPSPEED_*": _refused("DeepSpeed then runs otherwise than its configuration says; unset it"),
    "TORCHDYNAMO_VERBOSE": _accepted(_PRINTS),
    "TORCHDYNAMO_*": _refused("changes what is compiled; unset it, and pass --compile or leave it out"),
    "TORCHINDUCTOR_CACHE_DIR": _accepted(f"where compiled code is kept; {_RECORDED}"),
    "TORCHINDUCTOR_COMPILE_THREADS": _accepted(f"how fast it is compiled, not what; {_RECORDED}"),
    "TORCHINDUCTOR_*": _refused("changes what is compiled; unset it, and pass --compile or leave it out"),
    "TORCH_COMPILE_*": _refused("changes what is compiled; unset it, and pass --compile or leave it out"),
}

# Whatever else of these families is set stands in a record: names and values, by `records.machine`.
_RANK_NAMES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|ROLE_NAME|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|"
    r"(OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD)_(LOCAL_)?(RANK|SIZE)"
)


def says_which_rank(name: str) -> bool:
    """Say whether a launcher tells a process by this variable which rank it is, and where the others are."""
    return _RANK_NAMES.fullmatch(name) is not None


def of_flag(name: str) -> Rule:
    """What becomes of a flag, by the launcher's own name for it. One that is not known is refused."""
    return _first(FLAGS, name) or _refused("this version of the study does not know it; remove it")


def of_variable(name: str) -> Rule | None:
    """What becomes of a variable; None where it is of no family that changes a run behind its configuration."""
    return _first(VARIABLES, name)


def check_flags(flags: Iterable[str]) -> None:
    """Refuse the first flag, by the launcher's own name for it, that a run may not have."""
    for name in flags:
        if not (rule := of_flag(name)).is_accepted:
            raise Refusal(f"accelerate launch --{name} {rule.why}")


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuse the first variable of the launcher's environment that would change a run behind its configuration."""
    for name in sorted(environment):
        if (rule := of_variable(name)) and not rule.is_accepted:
            raise Refusal(f"{name} is set in the environment, and {rule.why}")


def check_rank(environment: Mapping[str, str], world_size: int, is_distributed: bool) -> None:
    """Refuse a process that is told to be a rank which the run has not.

    Accelerate's launcher of one process passes on what it finds; torchrun, for the others, says it anew.
    """
    if not is_distributed:
        for name in sorted(filter(says_which_rank, environment)):
            if not name.startswith("MASTER_"):
                raise Refusal(
                    f"{name}={environment[name]} in the environment: the run is one process, without ranks; unset it, "
                    "or start it as `zero-study train`, which does"
                )
        return
    told = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if told["WORLD_SIZE"] != str(world_size) or not told["RANK"].isdigit() or int(told["RANK"]) >= world_size:
        raise Refusal(
            f"RANK={told['RANK']} and WORLD_SIZE={told['WORLD_SIZE']} in the environment: the run asks for "
            f"{world_size} processes; change num_processes in the strategy's file, or --num_processes"
        )


def _first(rules: Mapping[str, Rule], name: str) -> Rule | None:
    return next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), None)
