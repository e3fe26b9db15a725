"""What does SkyPilot make of files of docs/clouds/? Run by the Python of build/skypilot: FILE...

Its own parser, optimizer, and word on what the cloud that it chooses can do; a line of JSON for each file. Not its own
are the clouds that count as enabled, and their prices, below HOME, which test_skypilot.py writes. The rest of a dry run
takes an account.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import sky
import yaml
from sky import check, clouds, dag, optimizer
from sky.catalog import aws_catalog

check.get_cached_enabled_clouds_or_refresh = lambda *_, **__: [clouds.AWS(), clouds.Azure()]
aws_catalog._get_az_mappings = lambda *_: None  # an account's own names of zones


def read(path: str) -> dict[str, Any]:
    task = sky.Task.from_yaml_config(yaml.safe_load(Path(path).read_text()), env_overrides=[("BUCKET", "my-bucket")])
    task.validate()
    (wanted,), (bucket,) = task.resources, task.storage_mounts.values()
    with dag.Dag() as alone:
        alone.add(task)
    optimizer.Optimizer.optimize(alone, quiet=True)
    chosen = task.best_resources
    needed = task.get_required_cloud_features() | {clouds.CloudImplementationFeatures.AUTODOWN}
    chosen.cloud.check_features_are_supported(chosen, needed)
    return {
        "nodes": task.num_nodes,
        "instance": chosen.instance_type,
        "dollars_per_hour": round(task.num_nodes * chosen.get_cost(3600), 3),
        "minutes_until_down": wanted.autostop_config.idle_minutes if wanted.autostop_config.down else None,
        "bucket": [bucket.name, bucket.mode.value],
    }


for path in sys.argv[1:]:
    print(json.dumps(read(path)))
