"""Write scripts that call functions, and start this package's programs in processes of their own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Refusal
from ..files import CONFIGS, ROOT

# Executes a program of this package by its path. The package is imported before the folder of the user's script is on
# the path, which may have a package of the same name. Its own folder goes to the end of the path.
START = (
    "import runpy, sys; root, program = sys.argv[1:3]; sys.argv[1:3] = []; sys.path.insert(1, root); "
    "import zero_study; sys.path.remove(root); sys.path.append(root); runpy.run_path(program, run_name='__main__')"
)
PACKAGE = Path(__file__).parents[1]

Trained = Callable[..., Any] | str | os.PathLike[str]  # a function, or the path of a script


class Script(NamedTuple):
    """A script that trains, with its arguments."""

    path: Path
    arguments: list[str]
    name: str  # of the function or of the script, for messages
    is_function: bool = False
    takes_strategy: bool = False  # a function with a parameter `strategy`, which gets the strategy's name

    def arguments_for(self, strategy: str) -> list[str]:
        return [strategy] if self.takes_strategy else self.arguments


def script_of(trained: Trained, arguments: Sequence[object], folder: Path) -> Script:
    """Return the path of a script. For a function, write a script into `folder` that calls it. Raises Refusal.

    `arguments` are the positional arguments of the function, or the words after the script.
    """
    if callable(trained):
        return _script_of_function(trained, arguments, folder)
    path = Path(trained)
    if not path.is_file():
        raise Refusal(f"{path}: this script does not exist. Pass a function, or the path of a script that trains.")
    return Script(path.absolute(), [str(word) for word in arguments], path.name)


def _script_of_function(function: Callable[..., Any], arguments: Sequence[object], folder: Path) -> Script:
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    given = functools.partial(function, *arguments)
    try:
        pickled = pickle.dumps(given)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Refusal(
            f"{name} cannot be called in another process ({error}). Define the function at the top level of a module, "
            "so that it can be imported, and pass only arguments that pickle accepts."
        ) from None
    module = sys.modules[getattr(inner, "__module__", None) or type(inner).__module__]
    if getattr(module, "__file__", None) is None:
        raise Refusal(
            f"{name} cannot be called in another process, because its module has no file. "
            "Define the function in a module that has a file."
        )
    (folder / "function.pickle").write_bytes(pickled)
    # "__main__" of this process is another module there.
    words = [str(folder / "function.pickle"), module.__name__, str(Path(str(module.__file__)).absolute())]
    lines = [
        "import runpy, sys",
        f"sys.path[:] = {[os.path.abspath(entry) for entry in sys.path]!r}",
        f"call = runpy.run_path({str(Path(__file__).with_name('calling.py'))!r})",
        f"call['run'](__name__, *{words!r}, sys.argv[1:])",
    ]
    path = folder / f"{getattr(inner, '__name__', 'function')}.py"
    path.write_text("\n".join(lines) + "\n")
    takes_strategy = "strategy" in inspect.signature(given).parameters and "strategy" not in given.keywords
    return Script(path, [], name, True, takes_strategy)


def words(program: str, *arguments: str) -> list[str]:
    """Return what follows `python` in the command of a program, given by its path within this package."""
    return ["-c", START, str(ROOT), str(PACKAGE / program), *arguments]


def environment() -> Mapping[str, str]:
    """Return the environment variables of the programs: no GPU, one thread per process, and wide lines."""
    own = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
    # A launcher's variables for this process are not those of the ranks.
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in launchers and not name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
    }
    return {"OMP_NUM_THREADS": "1", **inherited, **own}


def file_of(strategy: str | os.PathLike[str]) -> Path:
    """Return the accelerate file of a strategy: a shipped one by its name, or the file itself. Raises Refusal."""
    shipped = CONFIGS / f"{os.fspath(strategy)}.yaml"
    if shipped.is_file():
        return shipped
    path = Path(strategy)
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in shipped.parent.glob("*.yaml")))
        raise Refusal(f"{path}: there is no strategy and no file of this name. Shipped strategies are: {names}.")
    return path.absolute()


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it has been imported, and does not say from where
        return True
