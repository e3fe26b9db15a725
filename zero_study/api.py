"""Run the commands of zero-study as Python functions.

Each function returns what its command prints with --json, as a typed object.

    from zero_study import api

    answer = api.doctor("ds_config.json")
    if answer.verdict != "sound":
        for finding in answer.findings:
            print(finding.id, finding.place.line, finding.text, finding.remedy)

A request that the command refuses raises Refusal, whose message says what is wrong and what to do. Nothing is printed
to standard output.

Further options have the names of the command line, with underscores: write `global_batch_size=64` for
`--global-batch-size 64`. Write `True` for an option without a value, and a list for an option that is repeated.

Later releases keep these functions, their parameters, and the fields of the answers. They can add fields, and
parameters that have a default value.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from zero_study import cli
from zero_study.answers import envelope, models
from zero_study.answers.models import (
    AdviseAnswer,
    CheckAnswer,
    ClaimsAnswer,
    DiffAnswer,
    DoctorAnswer,
    DryRunAnswer,
    ImportAnswer,
    ProveAnswer,
    SavedAnswer,
    UpgradeAnswer,
    WhyAnswer,
)
from zero_study.errors import Refusal

__all__ = [
    "Refusal", "advise", "check", "claims", "diff", "doctor", "dry_run", "import_log", "prove", "saved", "upgrade",
    "why",
]  # fmt: skip

Value = str | int | float | bool | Path | None
Option = Value | Sequence[Value]
_Answer = TypeVar("_Answer", bound=models.Answer)


def advise(
    model: str | Path | None = None, *, gpu: str | None = None, gpus: int | None = None, **options: Option
) -> AdviseAnswer:
    """Predict the memory, the time and the price of every strategy for a model on GPUs, and recommend one.

    `model` is a known name, the id of a model on the Hugging Face hub, or the path of a config.json. Without `gpus`,
    the answer says how many GPUs the model needs; without `gpu`, it compares machines.
    """
    return _ask(AdviseAnswer, "advise", [], model=model, gpu=gpu, gpus=gpus, **options)


def check(*paths: str | Path, since: str | None = None) -> CheckAnswer:
    """Check the configuration files, lock files and checkpoints of a project, by default those of the current folder.

    A checkpoint is checked if `paths` name its folder or, without `paths`, if the project's settings list it. Lock
    files are compared with those of the commit `since`, by default HEAD.
    """
    return _ask(CheckAnswer, "check", paths, since=since)


def claims(source: str | None = None, *, search: str | None = None) -> ClaimsAnswer:
    """Return published sentences about ZeRO with their verdicts.

    `source` selects the sentences of one source, and `search` the sentences that contain the given words.
    """
    return _ask(ClaimsAnswer, "claims", [] if source is None else [source], search=search)


def diff(a: str | Path, b: str | Path) -> DiffAnswer:
    """Find the first tensor in which two recorded trainings differ by more than rounding.

    `a` and `b` are folders that `python -m zero_study.diff --output` wrote.
    """
    return _ask(DiffAnswer, "diff", [a, b])


def doctor(*files: str | Path, release: str | Sequence[str] = ()) -> DoctorAnswer:
    """Report what the engine does with each key of configuration files. Without files, check this machine.

    With `release`, such as "deepspeed==0.18.2" or a list of releases of several packages, the files are judged as these
    releases read them, and their known faults are looked up.
    """
    return _ask(DoctorAnswer, "doctor", files, **{"for": release})


def dry_run(
    strategy: str | Path, script: str | Path | None = None, *arguments: str, world: int, **options: Option
) -> DryRunAnswer:
    """Simulate a training on `world` ranks without GPUs, and find ranks that would wait for each other forever.

    `strategy` is an accelerate file or the name of a strategy. Without a script, the option `model` names the model.
    """
    words = [strategy] if script is None else [strategy, script, *arguments]
    return _ask(DryRunAnswer, "dry-run", words, world=world, **options)


def import_log(*logs: str | Path, output: str | Path, name: str | None = None, **setting: Value) -> ImportAnswer:
    """Read logs of other trainings, and write them into the folder `output` as runs for `zero-study compare`.

    `setting` states what the logs do not, such as gpu="h100", num_gpus=8 or strategy="zero3".
    """
    stated = [f"{field}={value}" for field, value in setting.items()]
    return _ask(ImportAnswer, "import", logs, output=output, name=name, set=stated)


def prove(script: str | Path, *arguments: str, ranks: int = 1, reference: bool = False) -> ProveAnswer:
    """Run a training script as `ranks` processes, and check the engine, its settings and one optimizer step.

    What the script prints goes to standard error. With `reference`, the gradients are compared with gradients
    computed without the engine. This takes memory for the whole model on every rank.
    """
    if not Path(script).is_file():
        raise Refusal(f"{script}: this file does not exist. Name a script, followed by its arguments.")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    flags = ["--json", "--strict", *(["--reference"] if reference else [])]
    words = [sys.executable, *launcher, "-m", "zero_study.prove", *flags, str(script), *arguments]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{script} ended with status {done.returncode} before there was an answer.")
    return _typed(ProveAnswer, models.validated_text(done.stdout))


def saved(folder: str | Path, *, against: str | Path | None = None, model: str | Path | None = None) -> SavedAnswer:
    """Check whether a checkpoint or a saved model contains the weights that were trained.

    `against` is another checkpoint or a recording to compare it with. `model` is a folder with the model's config.json.
    """
    return _ask(SavedAnswer, "saved", [folder], against=against, model=model)


def upgrade(
    old: str | Path, new: str | Path, *, config: str | Path | None = None, script: str | Path | None = None
) -> UpgradeAnswer:
    """Compare two files that pin releases, and return what the upgrade changes in a training.

    With `config` and `script`, changes that cannot concern this training are left out.
    """
    return _ask(UpgradeAnswer, "upgrade", [old, new], config=config, script=script)


def why(*logs: str | Path, **options: Option) -> WhyAnswer:
    """Find the first cause in the logs of a run that failed, hung, was slow or trained wrongly.

    `logs` are the logs of one run, for instance one per rank. The options describe the training: `model`, `gpu`,
    `gpus` and others.
    """
    return _ask(WhyAnswer, "why", logs, **options)


def _ask(kind: type[_Answer], command: str, arguments: Sequence[str | Path], **options: Option) -> _Answer:
    """Run a command as its command line would, and return its answer. Raises Refusal."""
    given = [word for name, value in options.items() for word in _words(name, value)]
    answer = cli.answer_of([command, "--json", *given, *map(str, arguments)])
    return _typed(kind, models.validated(envelope.plain(answer.content)))


def _typed(kind: type[_Answer], answer: models.Answer | models.ErrorAnswer) -> _Answer:
    """Return an answer of this type. Raises Refusal if there is an error instead."""
    if isinstance(answer, models.ErrorAnswer):
        raise Refusal(answer.error.message)
    assert isinstance(answer, kind)
    return answer


def _words(name: str, value: Option) -> list[str]:
    """Return an option as the words of a command line."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (str, int, float, Path)):
        return [f"{flag}={value}"]
    return [word for member in value for word in _words(name, member)]
