"""The share of time that checkpoints, lost work and restarts take, by simulation of failures, for several intervals."""

import random

SAVE, RESTART, NODES, NODE_DAYS = 3.0, 12.0, 64, 40.0  # minutes; failures are exponential
BETWEEN_FAILURES = NODE_DAYS * 24 * 60 / NODES  # of the job: 900 minutes


def lost_share(interval: float, useful: float = 2_000_000.0) -> float:
    """Simulate until `useful` minutes of work are saved; the interval is the work between two saves."""
    generator = random.Random(0)
    clock = saved = 0.0
    failure = generator.expovariate(1 / BETWEEN_FAILURES)
    while saved < useful:
        if failure >= interval + SAVE:
            clock += interval + SAVE
            saved += interval
            failure -= interval + SAVE
        else:
            clock += failure + RESTART
            failure = generator.expovariate(1 / BETWEEN_FAILURES)
    return 1 - saved / clock


young = (2 * SAVE * BETWEEN_FAILURES) ** 0.5
print(f"mean time between failures of the job {BETWEEN_FAILURES:.0f} min; Young {young:.1f} min")
for minutes in (20, 40, 55, 65, 72, 80, 100, 150, 300):
    print(f"every {minutes:3d} min: {100 * lost_share(minutes):.2f} % of the time is lost")
