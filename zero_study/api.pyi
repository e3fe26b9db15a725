"""The types of `zero_study.api`, which is `study.api`."""

from study.api import *  # noqa: F403
