"""Find out why a run failed, from what it printed. `zero-study why` prints the answer.

`log` reads the lines of all ranks in one pass. `rules` has the messages that are known, `memory`, `hangs`, `training`
and `slow` conclude from numbers, and `answer` decides which cause came first.
"""
