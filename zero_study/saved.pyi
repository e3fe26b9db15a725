"""The types of `zero_study.saved`, which is `study.saved` under its second name."""

from study.saved import *  # noqa: F403
