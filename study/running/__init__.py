"""How is a study run to its end: its runs, the plan, one launch after another, and how each one ended?"""
