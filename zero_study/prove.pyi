"""The types of `zero_study.prove`, which is `study.prove` under its second name."""

from study.prove import *  # noqa: F403
