# What every file beside this one does first, on each box: the environment.
set -e
uv python install 3.12  # an image's own Python may be older than the study's, 3.11
make setup PYTHON="$(uv python find --system 3.12)"
# With a driver too old for torch every run would be skipped, with the reason, on a box that is paid for: fail now.
.venv/bin/python -c 'import torch; torch.cuda.init()'
