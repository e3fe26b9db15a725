# Make the folders `model`, `a` and `b`, which README's table examines. This needs PyTorch and DeepSpeed.
set -e
torchrun --standalone --nproc-per-node 2 train_save.py > train.log 2>&1
torchrun --standalone --nproc-per-node 2 -m zero_study.diff --output a train_a.py
torchrun --standalone --nproc-per-node 2 -m zero_study.diff --output b train_b.py
