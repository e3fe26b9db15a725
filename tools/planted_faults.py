"""Plants silent faults in study/, one at a time in a copy of the tree, and says which of them the tests see.

    python tools/planted_faults.py                      every fault: some 15 minutes of one core
    python tools/planted_faults.py --only resume        those whose name contains this; may be repeated
    python tools/planted_faults.py --quick              without the tests that start another Python
    python tools/planted_faults.py --output FILE        also write the results as JSON; what it has already is kept

A fault is a text of study/ and what stands in its place: the text has to be there exactly once, in whatever file.
Its tests are words for pytest. They are run as they are first, where they have to pass, and then with the fault: those
that start no Python, and where these see nothing those that do. A fault is caught where one of them fails.
Run it in the folder of the tree, with its Python. Exit status: 0 all are caught; 1 one is not, or cannot be planted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One silent fault, and the tests that should see it."""

    name: str  # kind: what is wrong
    before: str
    after: str
    quick: str = ""  # words for pytest, of tests that start no Python; empty: none can
    launching: str = ""  # of tests that do


FAULTS = (
    Fault(
        "arithmetic: the held-out loss is averaged over batches, the last of which is incomplete",
        '{"loss": torch.cat(losses).double().mean()',
        '{"loss": torch.stack([each.double().mean() for each in losses]).mean()',
        launching="tests/test_parity.py -k world_size and bert",
    ),
    Fault(
        "arithmetic: the loss is summed over micro steps",
        "torch.stack([loss_sum / accumulation,",
        "torch.stack([loss_sum,",
        launching="tests/test_parity.py -k world_size and bert",
    ),
    Fault(
        "arithmetic: the learning rate is one step ahead",
        "(step - 1 - self.warmup_steps) /",
        "(step - self.warmup_steps) /",
        "tests/test_config.py",
    ),
    Fault(
        "arithmetic: biases and norms decay",
        '"weight_decay": 0.0},',
        '"weight_decay": weight_decay},',
        "tests/test_traps.py",
    ),
    Fault(
        "arithmetic: stage 2 keeps whole gradients",
        "gradients=size / world_size if zero_stage >= 2 else size",
        "gradients=size / world_size if zero_stage >= 3 else size",
        "tests/test_theory.py",
    ),
    Fault(
        "reading: an accumulation that a DeepSpeed JSON says is left aside",
        "gradient_accumulation_steps=accumulation,\n        content=content,",
        "gradient_accumulation_steps=None,\n        content=content,",
        "tests/test_strategy.py",
    ),
    Fault(
        "reading: the devices of optimizer and parameters are taken for one another",
        'offload_optimizer_device=devices["optimizer"],\n        offload_param_device=devices["param"],',
        'offload_optimizer_device=devices["param"],\n        offload_param_device=devices["optimizer"],',
        "tests/test_strategy.py",
    ),
    Fault(
        "reading: FSDP2's resharding is read under another name",
        '.get("fsdp_reshard_after_forward"))',
        '.get("reshard_after_forward"))',
        "tests/test_fsdp.py tests/test_strategy.py",
        launching="tests/test_fsdp.py -k block_by_block",
    ),
    Fault(
        "reading: doctor takes 16 bits for asked where they are left open",
        'if self.get(f"{name}.enabled") is True), "")',
        'if self.get(f"{name}.enabled", False) is not False), "")',
        "tests/test_doctor_file.py",
        launching="tests/test_doctor_file.py tests/test_observed.py",
    ),
    Fault(
        "proof: what was asked stands for what the engine says",
        "facts |= facts_of_deepspeed(model)\n",
        'facts |= facts_of_deepspeed(model) | {name: getattr(run.strategy, name) for name in ("zero_stage", '
        '"offload_optimizer_device")} | {"gradient_accumulation_steps": run.gradient_accumulation_steps}\n',
        launching="tests/test_settings.py -k real_engine",
    ),
    Fault(
        "proof: the keys of a DeepSpeed JSON are held against nothing",
        "settings.asked(run.strategy.deepspeed_json or {})",
        "settings.asked({})",
        "tests/test_settings.py",
    ),
    Fault(
        "proof: a rank with other data passes",
        "if digest != digests[0]:",
        "if digest != digest:",
        "tests/test_machines.py",
    ),
    Fault(
        "proof: prove counts the shard of its own rank",
        'getattr(parameter, "ds_numel", parameter.numel())\n    return size',
        'getattr(getattr(parameter, "ds_tensor", parameter), "ds_numel", '
        'getattr(parameter, "_local_tensor", parameter).numel())\n    return size',
        launching="tests/test_prove.py -k counted_whole",
    ),
    Fault(
        "records: rank 0's model states are recorded for every rank",
        "model_state_bytes=[rank.model_states for rank in ranks]",
        "model_state_bytes=[ranks[0].model_states for rank in ranks]",
        launching="tests/test_train.py -k states_of_every_rank",
    ),
    Fault(
        "records: a pack's members are not held against its manifest",
        "if hashlib.sha256(member).hexdigest() != manifest.sha256[name]:",
        "if manifest.sha256[name] != manifest.sha256[name]:",
        "tests/test_pack.py",
    ),
    Fault(
        "records: steps that are not the record's are read with it",
        "if content is not None and digest not in (None, hashlib",
        "if content is None and digest not in (None, hashlib",
        "tests/test_record.py tests/test_hostile_records.py",
    ),
    Fault(
        "records: the warm-up of a process that went on is timed",
        "for start in (0, *resumed_at) for n in",
        "for start in (0,) for n in",
        "tests/test_checkpoints.py",
    ),
    Fault(
        "resume: the random state is lost under NVMe offload",
        "for device, digits in state.random.items():",
        "for device, digits in () if built.run.strategy.offloads_to_nvme else state.random.items():",
        launching="tests/test_checkpoints.py -k goes_on_bit_by_bit and nvme",
    ),
    Fault(
        "resume: Adam's count of steps is lost under NVMe offload",
        'optimizer.optimizer.state[master] = {"step": step, **',
        'optimizer.optimizer.state[master] = {"step": 0, **',
        launching="tests/test_checkpoints.py -k goes_on_bit_by_bit and nvme",
    ),
    Fault(
        "resume: a damaged file of equal length is loaded",
        "path.stat().st_size == size and files.sha256(path) == digest",
        "path.stat().st_size == size",
        "tests/test_checkpoints.py",
    ),
    Fault(
        "resume: another file of the strategy goes on from its checkpoint",
        'facts = ("strategy", "world_size", "device", "strategy_sha256")',
        'facts = ("strategy", "world_size", "device")',
        "tests/test_checkpoints.py",
    ),
    Fault(
        "resume: the order of examples begins after as many examples as steps are done",
        "order[steps_done * global_batch_size :",
        "order[steps_done :",
        "tests/test_order.py",
        launching="tests/test_checkpoints.py -k goes_on_bit_by_bit and ddp",
    ),
    Fault(
        "ends: a host that is out of memory is a crash",
        "out of memory|can't allocate memory|",
        "out of memory|",
        "tests/test_ending.py",
        launching="tests/test_failures.py -k memory",
    ),
    Fault(
        "ends: a batch is skipped though a run with a larger micro batch ran out of memory",
        "and other.micro_batch_size <= run.micro_batch_size:",
        "and other.micro_batch_size >= run.micro_batch_size:",
        "tests/test_plan.py",
    ),
    Fault(
        "planner: the most complex of those that are equally fast is recommended",
        "simplest = min(near, key=_complexity)",
        "simplest = max(near, key=_complexity)",
        "tests/test_advise.py",
    ),
    Fault(
        "planner: what norms keep is not counted",
        "(4 * full + size * short) + 4 * block.norms",
        "(4 * full + size * short)",
        "tests/test_residual.py tests/test_peaks.py",
    ),
    Fault(
        "verdicts: an interval that overlaps the margin is within it",
        "if -margin < low and high < margin:",
        "if low < margin and -margin < high:",
        "tests/test_verdict.py",
    ),
    Fault(
        "verdicts: a claim is contradicted where an interval only reaches beyond what is expected",
        "return False if high < least or low > most else None",
        "return False if low < least or high > most else None",
        "tests/test_claims.py",
    ),
    Fault(
        "verdicts: runs with other initial weights are compared",
        'return "other initial weights"',
        "return None",
        "tests/test_pairs.py tests/test_compare.py",
    ),
    Fault(
        "verdicts: ranks whose weights part are the same in conformance",
        '"wrong" if share > 1 or apart else "same"',
        '"wrong" if share > 1 else "same"',
        "tests/test_conformance.py",
        launching="tests/test_conformance.py -k apart or ranks",
    ),
)


@contextmanager
def copied(tree: Path) -> Iterator[Path]:
    """A copy of the tree with an environment that imports from it, for the length of a `with` block."""
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as scratch:
        copy = Path(scratch) / tree.name
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=tree, check=True, capture_output=True, text=True).stdout.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, copy / name)
        venv.create(copy / ".venv", with_pip=False)
        (packages,) = (copy / ".venv").glob("lib/python*/site-packages")
        theirs = [path for path in sys.path if path.endswith("-packages")]
        (packages / "of_the_tree.pth").write_text("\n".join([str(copy), *theirs, *site.getsitepackages()]))
        for name in (".torch_extensions", ".venv/bin/ninja", ".venv/bin/ruff"):
            if (tree / name).exists():
                (copy / name).symlink_to((tree / name).resolve())
        yield copy


def place_of(fault: Fault, copy: Path) -> Path | None:
    """The file that a fault's text is in; None where it is not in study/ exactly once."""
    counts = {path: path.read_text().count(fault.before) for path in (copy / "study").rglob("*.py")}
    return next(path for path, count in counts.items() if count) if sum(counts.values()) == 1 else None


def run_tests(words: str, mark: str, copy: Path) -> tuple[str, str]:
    """Run tests until one fails: passed, failed with the test's name, or gone where there are none."""
    expression = words.split(" -k ")
    chosen = ["-k", expression[1]] if expression[1:] else []
    command = [str(copy / ".venv/bin/python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0", "-m", mark]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        [*command, *chosen, *expression[0].split()], cwd=copy, env=environment, capture_output=True, text=True
    )
    if done.returncode in (0, 1):
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return ("passed", "") if done.returncode == 0 else ("failed", (failed or ["?"])[0])
    return "gone", f"{words}: pytest ended with {done.returncode}: {(done.stdout.strip().splitlines() or [''])[-1]}"


def examine(fault: Fault, copy: Path, quick_only: bool, sound: dict[tuple[str, str], str]) -> str:
    """Say what becomes of one fault. `sound`: what tests say without any, which is looked up once."""
    stages = [(fault.quick, "not launches"), (fault.launching, "" if quick_only else "launches")]
    for words, mark in [stage for stage in stages if all(stage)]:
        if (words, mark) not in sound:
            state, name = run_tests(words, mark, copy)
            sound[words, mark] = "" if state == "passed" else f"{state} without a fault: {name}"
    said = []
    path = place_of(fault, copy)
    if path is None:
        return "cannot be planted: its text is not in study/ exactly once; write it anew"
    original = path.read_text()
    path.write_text(original.replace(fault.before, fault.after))
    try:
        for words, mark in [stage for stage in stages if all(stage)]:
            if sound[words, mark]:
                said.append(sound[words, mark])
                continue
            state, name = run_tests(words, mark, copy)
            if state == "failed":
                return f"caught by {name}" + (" (launches)" if mark == "launches" else "")
    finally:
        path.write_text(original)
    return "; ".join(["not caught", *said])


def main() -> int:
    """Read the command line, plant each fault and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="faults whose name contains this")
    parser.add_argument("--quick", action="store_true", help="no tests that start another Python")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file of the results")
    asked = parser.parse_args()
    results: dict[str, str] = {}
    if asked.output and asked.output.exists():
        results = json.loads(asked.output.read_text())
    chosen = [fault for fault in FAULTS if not asked.only or any(text in fault.name for text in asked.only)]
    sound: dict[tuple[str, str], str] = {}
    with copied(Path.cwd()) as copy:
        for fault in chosen:
            results[fault.name] = examine(fault, copy, asked.quick, sound)
            print(f"{fault.name}: {results[fault.name]}", flush=True)
            if asked.output:
                asked.output.write_text(json.dumps(results, indent=1))
    num_caught = sum(results[fault.name].startswith("caught") for fault in chosen)
    print(f"{num_caught} of {len(chosen)} faults are caught")
    return int(num_caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
