"""Draw memory and messages of the last of 2 to 4,096 simulated ranks: reports/dry_run/scaling.svg.

The data are in scaling.json in the same folder.
"""

import pandas as pd
from matplotlib import pyplot

from zero_study import files

RECORD = files.ROOT / "reports" / "dry_run" / "scaling.json"
NAMES = ["strategy", "ranks", "held between steps", "peak of a step", "sent in a step", "reserved"]

if __name__ == "__main__":
    pyplot.rcParams["svg.hashsalt"] = "zero-study"
    axes = pyplot.subplots(1, 3, figsize=(9.5, 3), layout="constrained")[1]
    table = pd.DataFrame(files.load(RECORD, "a dry run's record")["rows"], columns=NAMES).set_index(NAMES[1::-1])
    for axis, name in zip(axes, NAMES[2:5], strict=True):
        shown = {"title": f"{name}, GiB", "xlabel": "ranks", "legend": name == NAMES[3]}
        (table[name].unstack() / 2**30).plot(ax=axis, loglog=True, marker=".", **shown)
    axes[0].figure.savefig(RECORD.with_suffix(".svg"), metadata={"Date": None})
