"""Find out why a run failed, from what it printed. `zero-study why` prints the answer.

`log` reads the lines of all ranks in one pass. `rules` contains the known messages. `memory`, `hangs`, `training` and
`slow` draw conclusions from numbers. `answer` decides which cause came first.
"""
