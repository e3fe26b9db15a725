"""Compile one extension of DeepSpeed: `python compile_extension.py SEARCH_PATH MODULE BUILDER`.

SEARCH_PATH is Python's search path as a list in JSON, and BUILDER is a class of DeepSpeed's module MODULE. The result
is in the folder that TORCH_EXTENSIONS_DIR names.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_INCLUDED = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def main(search_path: str, module: str, builder: str) -> None:
    """Let DeepSpeed compile and load an extension.

    DeepSpeed's sources are joined to one file per processor, because a compiler spends most of its time on PyTorch's
    headers, which each source includes. If the joined files cannot be compiled, each source is compiled by itself.
    """
    sys.path[:] = json.loads(search_path)
    import torch.utils.cpp_extension as compiling

    load = compiling.load

    def load_joined(sources: Sequence[str], extra_cflags: Sequence[str], **options: Any) -> Any:
        # -g0 removes the debug information that DeepSpeed requests, which takes a quarter of the compiler's time.
        options["extra_cflags"] = [*extra_cflags, "-g0"]
        folder = Path(compiling._get_build_directory(options["name"], False))
        joined = join(sources, folder, os.cpu_count() or 1)
        if len(joined) < len(sources):
            try:
                return load(sources=joined, **options)
            except Exception as error:
                print(f"compiling each source by itself, because joined ones fail: {error}", flush=True)
        return load(sources=list(sources), **options)

    compiling.load = load_joined
    getattr(importlib.import_module(module), builder)().load()


def join(sources: Sequence[str], folder: Path, most: int) -> list[str]:
    """Write at most `most` files into a folder that include all sources, and return their paths.

    Sources in other languages than C++ are returned as they are. A header without a guard would be included twice.
    `#import` includes it once, so each file first imports the headers that its sources name, each after those that it
    includes itself.
    """
    own = [Path(source) for source in sources if source.endswith(".cpp")]
    others = [source for source in sources if not source.endswith(".cpp")]
    paths = []
    for number in range(min(most, len(own))):
        members = own[number::most]
        headers = dict.fromkeys(header for source in members for header in _headers(source, own))
        path = folder / f"joined{number}.cpp"
        lines = [*(f'#import "{header}"' for header in headers), *(f'#include "{source}"' for source in members)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(str(path))
    return [*paths, *others]


def _headers(path: Path, sources: Sequence[Path], seen: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the headers beside the sources that a file includes, directly or by another one, the innermost first."""
    folders = dict.fromkeys([path.parent, *(source.parent for source in sources)])
    for name in _INCLUDED.findall(path.read_text(encoding="utf-8", errors="replace")):
        header = next((found for folder in folders if (found := folder / name).is_file()), None)
        if header is not None and header not in seen:
            yield from _headers(header, sources, seen | {header})
            yield header


if __name__ == "__main__":
    main(*sys.argv[1:])
