"""Run a study from start to end: list its runs, plan them, launch them, and classify how each run ended."""
