"""What every test shares: the suite is for a CPU, so that it asks the same of a machine with GPUs."""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any test imports torch
