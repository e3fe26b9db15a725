"""Run a study from start to end: its runs, the plan, the launches, and how each run ended."""
