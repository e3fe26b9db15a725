"""The types of `zero_study.diff`, which is `study.diff` under its second name."""

from study.diff import *  # noqa: F403
