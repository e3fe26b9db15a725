"""Write docs/schemas: a JSON Schema of what each command prints with --json, and the ids of all findings.

python tools/derive/schemas.py

Only the ids are committed. `make site` also calls this program, so that the site has the schemas.

An id is never removed by this program. If a command no longer has a finding, remove its id from finding-ids.json by
hand, and say so in the changelog.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero_study.answers import ids, models
from zero_study.files import write_whole
from zero_study.why import json_answer

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"
IDS = FOLDER / "finding-ids.json"


def all_ids() -> dict[str, str]:
    """Return the ids of all findings of this release, and what each means."""
    return dict(sorted((ids.IDS | json_answer.ids()).items()))


def texts() -> dict[Path, str]:
    """Return the content of each file in the folder."""
    schemas = {FOLDER / f"{command}.json": models.json_schema(command) for command in models.ANSWERS}
    earlier = json.loads(IDS.read_text()) if IDS.exists() else {}
    contents: dict[Path, dict[str, Any]] = schemas | {IDS: dict(sorted((earlier | all_ids()).items()))}
    return {path: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for path, content in contents.items()}


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in texts().items():
        write_whole(path, text.encode())


if __name__ == "__main__":
    main()
