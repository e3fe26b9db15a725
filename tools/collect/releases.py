"""Write zero_study/upgrade/releases.json.gz: the defaults of each release of the packages that train.

    python tools/collect/releases.py [--all] [--cache FOLDER]

Releases that are already in the index are not read again, unless `--all` is given. Only the files that are needed are
fetched from PyPI: of a large wheel, the tool reads the table of contents and then these files by HTTP range requests.
Nothing is installed, imported or executed. `--cache` keeps the fetched files in a folder, so that another run with
`--all` fetches nothing twice (a quarter of an hour without it).
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import io
import json
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

import requests
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from release_defaults import defaults, keys_that_tests_distinguish

from zero_study import files
from zero_study.upgrade import release_index
from zero_study.upgrade.release_index import INDEX, Classes, Package

SINCE = "2024-09-01"  # releases that were uploaded earlier are not read
WHOLE = 3_000_000  # bytes: a wheel up to this size is fetched as a whole
READ = {
    "torch": r"torch/(optim/(?!_)\w+|nn/(parallel/distributed|utils/clip_grad|init|modules/(loss|normalization))"
    r"|nn/modules/dropout|distributed/fsdp/(api|fully_sharded_data_parallel|_fully_shard/_fully_shard|_fully_shard/_fsdp_api)"
    r"|utils/(checkpoint|data/(dataloader|distributed|sampler))|amp/(grad_scaler|autocast_mode))\.py$",
    "transformers": r"transformers/(training_args\w*|trainer|trainer_utils|trainer_optimizer|optimization|"
    r"data/data_collator|utils/quantization_config|loss/loss_utils)\.py$",
    "trl": r"trl/(.*_config|scripts/utils|data_utils|models/utils|trainer/base_trainer)\.py$",
    "accelerate": r"accelerate/(utils/(dataclasses|fsdp_utils)|parallelism_config|commands/launch|accelerator|"
    r"data_loader|scheduler|optimizer)\.py$",
    "deepspeed": r"deepspeed/(runtime/.*(config|constants|config_utils)|runtime/(lr_schedules|fp16/loss_scaler|"
    r"zero/muon/\w+)|compile/config|ops/(adam|lion|lamb|adagrad|muon)/\w+|moe/(layer|sharded_moe)|__init__)\.py$",
    "peft": r"peft/(config|mapping|mapping_func|tuners/(\w+/config|tuners_utils)|utils/other|optimizers/\w+)\.py$",
    "bitsandbytes": r"bitsandbytes/(optim/\w+|nn/modules|functional)\.py$",
    "torchao": r"torchao/(optim/\w+|prototype/low_bit_optim/\w+|float8/(config|float8_linear_utils)|"
    r"quantization/(quant_api|qat/\w+)|prototype/mx_formats/config)\.py$",
    "datasets": r"datasets/(arrow_dataset|iterable_dataset|dataset_dict|load|combine|distributed)\.py$",
    "liger-kernel": r"liger_kernel/(transformers/(monkey_patch|cross_entropy|fused_linear_\w+|functional|rms_norm|"
    r"jsd|kl_div|tvd|grpo_loss|auto_model|rope|layer_norm)|chunked_loss/\w+|ops/\w+)\.py$",
    "flash-attn": r"flash_attn/(flash_attn_interface|bert_padding|losses/\w+|modules/mha|ops/\w+|"
    r"ops/triton/(cross_entropy|layer_norm|rotary))\.py$",
}
Texts = dict[str, str]  # by path
EXTRAS = ("torch", "accelerate", "deepspeed", "peft", "liger", "quantization", "bnb")  # whose requirements count


@dataclass(frozen=True)
class Release:
    """What the index contains of one release."""

    date: str
    requires: Mapping[str, str]
    defaults: Classes
    distinguished: frozenset[str]  # keys for which the code tells None from False and from empty values


class RangeReader(io.RawIOBase):
    """A file on a server, of which only the parts that are read are fetched."""

    def __init__(self, session: requests.Session, url: str, size: int) -> None:
        self.session, self.url, self.size, self.position = session, url, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        if self.position >= self.size:
            return 0
        last = min(self.position + len(buffer), self.size) - 1
        answer = self.session.get(self.url, headers={"Range": f"bytes={self.position}-{last}"}, timeout=60)
        answer.raise_for_status()
        buffer[: len(answer.content)] = answer.content
        self.position += len(answer.content)
        return len(answer.content)


class Listing(NamedTuple):
    """What PyPI lists of a release: its date, and its smallest file, if possible a wheel."""

    date: str
    file: dict[str, Any]


def listed(session: requests.Session, package: str) -> dict[str, Listing]:
    """Return the final releases of a package since SINCE, the oldest first."""
    address = f"https://pypi.org/pypi/{package}/json"
    answer = session.get(address, timeout=60)
    answer.raise_for_status()
    releases = {}
    for version, distributions in answer.json()["releases"].items():
        kinds = ("bdist_wheel", "sdist")
        readable = [one for one in distributions if one["packagetype"] in kinds]
        if not readable or Version(version).is_prerelease:
            continue
        date = min(one["upload_time"] for one in readable)[:10]
        smallest = min(readable, key=lambda one: (kinds.index(one["packagetype"]), one["size"]))
        if date >= SINCE:
            releases[version] = Listing(date, smallest | {"url": urljoin(address, smallest["url"])})
    return dict(sorted(releases.items(), key=lambda item: Version(item[0])))


def fetched(session: requests.Session, package: str, version: str, file: Mapping[str, Any], cache: Path) -> Texts:
    """Return the texts of a release that are read, by path: the sources that READ names, and the metadata."""
    kept = cache / f"{package}-{version}.json"
    if not kept.is_file():
        wanted = re.compile(rf"(^|/){READ[package]}|^[^/]+/(METADATA|PKG-INFO)$")
        kept.write_text(json.dumps(dict(members(session, file, wanted))))
    texts: Texts = json.loads(kept.read_text())
    return texts


def members(session: requests.Session, file: Mapping[str, Any], wanted: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of the wanted members of a wheel or a source archive."""
    is_wheel = file["packagetype"] == "bdist_wheel"
    if is_wheel and file["size"] > WHOLE:
        archive: Any = io.BufferedReader(RangeReader(session, file["url"], file["size"]), 256 * 1024)
    else:
        answer = session.get(file["url"], timeout=300)
        answer.raise_for_status()
        archive = io.BytesIO(answer.content)
    if is_wheel or file["filename"].endswith(".zip"):
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if wanted.search(name):
                    yield name, wheel.read(name).decode()
    else:
        with tarfile.open(fileobj=archive) as source:
            for member in source:
                if member.isfile() and wanted.search(member.name):
                    yield member.name, source.extractfile(member).read().decode()  # type: ignore[union-attr]


def requirements(metadata: str) -> dict[str, str]:
    """Return the versions of packages of the index that a release requires, by name, as version specifiers."""
    required = {}
    for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # flash-attn's, of several lines
            continue
        name = canonicalize_name(requirement.name)
        extra = re.search(r'extra == "([\w-]+)"', str(requirement.marker or ""))
        if name in READ and requirement.specifier and (extra is None or extra[1] in EXTRAS):
            required.setdefault(name, str(requirement.specifier))
    return required


def read(session: requests.Session, package: str, version: str, listing: Listing, cache: Path) -> Release:
    """Return what the index contains of one release."""
    texts = fetched(session, package, version, listing.file, cache)
    metadata = next((text for path, text in texts.items() if not path.endswith(".py")), "")
    sources = {path: text for path, text in sorted(texts.items()) if path.endswith(".py")}
    if not sources:
        raise SystemExit(f"{package} {version}: {listing.file['filename']} has none of the files that are read")
    keys_told_apart = frozenset(keys_that_tests_distinguish(sources))
    return Release(listing.date, requirements(metadata), defaults(sources), keys_told_apart)


def unpacked(package: Package) -> dict[str, Release]:
    """Return the releases of a package of the index."""
    return {
        version: Release(date, package.requires_at(version), package.defaults_at(version), package.distinguished)
        for version, date in package.releases.items()
    }


def packed(releases: Mapping[str, Release]) -> dict[str, Any]:
    """Return the releases of a package as the index stores them: each value with the release that it applies from."""
    ordered = dict(sorted(releases.items(), key=lambda item: Version(item[0])))
    defaults: dict[str, dict[str, list[tuple[str, str | None]]]] = {}
    names = sorted(
        {(name, key) for release in ordered.values() for name, keys in release.defaults.items() for key in keys}
    )
    for name, key in names:
        values = ((version, release.defaults.get(name, {}).get(key)) for version, release in ordered.items())
        defaults.setdefault(name, {})[key] = [*first_of_equal(values)]
    keys = {key for _, key in names}
    return {
        "releases": {version: release.date for version, release in ordered.items()},
        "requires": dict(first_of_equal((version, dict(release.requires)) for version, release in ordered.items())),
        "defaults": defaults,
        "distinguished": sorted(keys & frozenset().union(*(release.distinguished for release in ordered.values()))),
    }


def first_of_equal(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the first of each series of equal values with its release. A series of None at the start is left out."""
    previous = None
    for version, value in values:
        if value != previous:
            yield version, value
        previous = value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="read every release again, also those in the index")
    parser.add_argument("--cache", type=Path, help="a folder that keeps the fetched files")
    options = parser.parse_args()
    known = release_index.read().packages if INDEX.is_file() and not options.all else {}
    content: dict[str, Any] = {"made": str(datetime.date.today()), "packages": {}}
    with tempfile.TemporaryDirectory() as temporary, requests.Session() as session:
        cache = options.cache or Path(temporary)
        cache.mkdir(parents=True, exist_ok=True)
        for package in READ:
            releases = unpacked(known[package]) if package in known else {}
            missing = {version: one for version, one in listed(session, package).items() if version not in releases}
            print(f"{package}: {len(releases)} releases in the index, {len(missing)} to read", flush=True)
            for version, listing in missing.items():
                releases[version] = read(session, package, version, listing, cache)
            content["packages"][package] = packed(releases)
    text = json.dumps(content, separators=(",", ":"))
    files.write_whole(INDEX, gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
