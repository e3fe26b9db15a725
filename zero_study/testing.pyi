"""The types of `zero_study.testing`, which is `study.testing` under its second name."""

from study.testing import *  # noqa: F403
