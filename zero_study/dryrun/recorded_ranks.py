"""Train a script on all ranks of small worlds on CPUs, one world per strategy, and record and prove each training.

This is the program that `zero_study.testing` starts. It imports the engines once, and forks the ranks of all worlds.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from zero_study import processes
from zero_study.diff.recording import Recorder
from zero_study.dryrun import text, world
from zero_study.dryrun.tracker import LIBRARIES
from zero_study.engines import extensions, scripts
from zero_study.engines.hooks import wrap_function
from zero_study.prove.__main__ import proved
from zero_study.ranks import worlds

# What a launch without a strategy sets. The process group of one rank lets a script run that expects a launcher.
ONE_PROCESS = {"CUDA_VISIBLE_DEVICES": ""}


class Training(NamedTuple):
    """One training of a script: its strategy, its ranks, and where it is recorded."""

    file: Path | None  # accelerate's file of the strategy; None: one process without a strategy
    num_ranks: int
    arguments: list[str]  # of the script
    recording: Path
    noise: int | None  # the number of a run with random rounding; None: as usual
    precision: str  # mixed precision: no, fp16 or bf16; of the strategy's file if empty
    clipping: float | None  # the gradient norm at which DeepSpeed clips, 0 for never; None: as the file says

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Training:
        file = None if content["file"] is None else Path(content["file"])
        return cls(**{**content, "file": file, "recording": Path(content["recording"])})

    def environment(self) -> dict[str, str]:
        """Return the environment variables that accelerate's launcher would set. Also import the strategy's engines.

        Raises Refusal for a file that cannot be run here.
        """
        if self.file is None:
            return ONE_PROCESS | {"ACCELERATE_MIXED_PRECISION": self.precision or "no"}
        variables = world.launch_environment(self.file, self.num_ranks, self.precision or None)
        if "ACCELERATE_USE_DEEPSPEED" in variables and "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in variables:
            # The launcher sets a number of micro batches that the file does not name, against that of the script.
            variables.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
            if self.clipping is not None:
                variables.pop("ACCELERATE_GRADIENT_CLIPPING", None)
        return variables

    @contextmanager
    def clipped(self) -> Iterator[None]:
        """Make DeepSpeed clip gradients at the requested norm, in a `with` block. By default, it would clip at 1.0."""
        import accelerate

        def complete(call: Any, plugin: Any, *arguments: Any, **options: Any) -> None:
            call(plugin, *arguments, **options)
            if self.clipping is not None:
                plugin.deepspeed_config["gradient_clipping"] = self.clipping

        with wrap_function(accelerate.DeepSpeedPlugin, "__post_init__", complete):
            yield


def main() -> None:
    """Carry out the trainings that the first argument describes, and send the results to the parent process.

    The result has an entry per training: the proofs of its ranks, and why it failed, or None. If the first training
    fails or trains nothing, it is the only entry.
    """
    request = json.loads(sys.argv[1])
    script, num_steps = Path(request["script"]), request["steps"]
    trainings = [Training.read(content) for content in request["trainings"]]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    extensions.use_own_folder()
    environments = [training.environment() for training in trainings]
    if request["is_function"]:
        runpy.run_path(str(script), run_name="before_forks")  # imports the function's module once for all ranks
    worlds.freeze()
    planned = [
        worlds.World(
            training.num_ranks, functools.partial(_train, training, variables, script, num_steps), request["seconds"]
        )
        for training, variables in zip(trainings, environments, strict=True)
    ]
    # The others are compared with the first one, and a run with noise belongs to its recording.
    results = _run(planned[:1])
    if not _outcome(results[0])["failure"] and any(trainings[0].recording.glob("rank-*")):
        results += _run(planned[1:])
    processes.send_result([_outcome(result) for result in results])


def _run(planned: Sequence[worlds.World]) -> list[worlds.Result]:
    return [result for _, result in sorted(worlds.run(planned))]


def _outcome(result: worlds.Result) -> dict[str, Any]:
    """Return the result of a world for JSON. An error that only follows from the end of another rank is left out."""
    failures = text.failures(result.answers)
    own = text.own_failures(failures) or failures
    failure = result.failure or next((f"rank {rank} {reason}" for rank, reason in own.items()), None)
    proofs = [answer["proof"] for answer in result.answers.values() if answer["proof"]]
    return {"failure": failure, "proofs": proofs}


def _train(
    training: Training, variables: dict[str, str], script: Path, num_steps: int, rank: int, folder: Path
) -> dict[str, Any]:
    """Run the script as one rank, and return its proof and its error. Each of them may be None."""
    size = training.num_ranks
    proof, raised = None, None
    with world.rank_of_many(rank, size, size, variables, folder / "store"), training.clipped():
        recorder = Recorder(training.recording, num_steps, training.noise, None, script, training.arguments)
        run = functools.partial(scripts.run, script, training.arguments)
        try:
            if training.noise is None:
                proof = proved(run, folder / "proof.json")
            else:
                run()
        except SystemExit as end:
            raised = f"SystemExit: {end.code}" if end.code else None
        except Exception as error:
            raised = _described(error)
        recorder.end(RuntimeError() if raised else None)
    return {"proof": proof, "raised": raised}


def _described(error: Exception) -> str:
    """Return the type, the first line and the location of an error in the user's code."""
    lines = str(error).strip().splitlines()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame.filename)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}{place}"


def _is_of_user(file: str) -> bool:
    own = str(Path(__file__).parents[1])
    return not file.startswith(own) and not any(part in file for part in LIBRARIES)


if __name__ == "__main__":
    main()
