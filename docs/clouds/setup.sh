# What every file beside this one does first, on each box: the environment.
set -e
PATH="$HOME/.local/bin:$PATH"  # where SkyPilot installs uv
command -v make >/dev/null || { sudo -n apt-get update -qq; sudo -n apt-get install -qq -y make; }
# An image's own Python may be older than the study's, 3.11. If uv has no other one, make setup says what is wrong.
if uv python install 3.12; then
  make setup PYTHON="$(uv python find --system 3.12)"
else
  make setup
fi
# With a driver too old for torch every run would be skipped, with the reason, on a box that is paid for: fail now.
.venv/bin/python -c 'import torch; torch.cuda.init()'
# DeepSpeed's extensions for offload. Without them, the runs with offload are skipped, and all others still run.
.venv/bin/python -m zero_study.engines.extensions cpu_adam async_io || true
