"""Check whether torch.compile finds what it needs on this machine, before a run would fail in its first step."""

from __future__ import annotations

import os
import shutil

from .extensions import Obstacle, missing_header


def obstacle(on_gpu: bool) -> Obstacle | None:
    """Return the reason why torch.compile cannot compile a model for a GPU or for the CPU. None if there is none.

    On a GPU, Triton compiles a C module that loads its kernels, and does so in a run. On a CPU, the model itself
    becomes C++. Both include Python.h.
    """
    variable, programs, language, package = (
        ("CC", ("gcc", "clang"), "C", "gcc") if on_gpu else ("CXX", ("g++",), "C++", "g++")
    )
    if selected := os.environ.get(variable):
        programs = (selected,)
    compiler = next(filter(None, map(shutil.which, programs)), None)
    failure = "torch.compile would fail in the first step"
    if compiler is None:
        return Obstacle(
            f"{failure}: there is no {language} compiler, because PATH has no {' and no '.join(programs)}.",
            f"To install {package}, run `apt-get install {package}` or `dnf install "
            f"{'gcc' if on_gpu else 'gcc-c++'}`. Or set {variable}.",
        )
    return missing_header(failure)
