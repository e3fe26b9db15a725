"""Look up the date, the defaults and the requirements of each release of the packages that trainings use.

tools/collect/releases.py writes the file. Nothing is known about releases that are not in it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import Version

INDEX = Path(__file__).with_name("releases.json.gz")
Classes = dict[str, dict[str, str]]  # the defaults of a release as source text, by class and key


@dataclass(frozen=True)
class Package:
    """The facts that are known about the releases of a package."""

    releases: Mapping[str, str]  # the date of each release, the oldest release first
    # What a release requires of other packages, and the history of each default. A value applies from its release on,
    # until the next value. None: from this release on, there is no such key.
    requires: Mapping[str, Mapping[str, str]]
    defaults: Mapping[str, Mapping[str, list[tuple[str, str | None]]]]
    distinguished: frozenset[str] = frozenset()  # keys for which the code tells None from False and from empty values

    def requires_at(self, version: str) -> Mapping[str, str]:
        """Return the version specifiers that an examined release requires of other packages, by name."""
        applicable = [release for release in self.requires if Version(release) <= Version(version)]
        return self.requires[applicable[-1]] if applicable else {}

    def defaults_at(self, version: str) -> Classes:
        """Return the defaults of an examined release by class and key."""
        order = {release: position for position, release in enumerate(self.releases)}
        classes: Classes = {}
        for name, keys in self.defaults.items():
            for key, history in keys.items():
                values = [value for since, value in history if order[since] <= order[version]]
                if values and values[-1] is not None:
                    classes.setdefault(name, {})[key] = values[-1]
        return classes


@dataclass(frozen=True)
class Index:
    """The packages of the index, and the day on which it was last brought up to date."""

    made: str
    packages: Mapping[str, Package]


@cache
def read() -> Index:
    """Return the index of examined releases from its file."""
    content = json.loads(gzip.decompress(INDEX.read_bytes()))
    packages = {
        name: Package(**{**package, "distinguished": frozenset(package["distinguished"])})
        for name, package in content["packages"].items()
    }
    return Index(content["made"], packages)
