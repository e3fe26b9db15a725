# Start a training command, wait until its run has written a checkpoint, and interrupt it.
#     sh interrupt.sh COMMAND ...
"$@" > interrupted.log 2>&1 &
until ls -d runs/*/checkpoints/step-???????? 2> waiting.log; do sleep 0.2; done
kill $!
wait
tail -n 1 interrupted.log
