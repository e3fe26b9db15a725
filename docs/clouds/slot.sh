# Sourced by the files beside this one. A slot begins with the runs that earlier slots left in the bucket. However it ends,
# it leaves there all runs, for the next slot, and their pack, for home; then nothing is lost when the box is taken down.
. .venv/bin/activate
rm -f runs/*.zip
if [ -f ~/bucket/runs.tar ]; then tar xf ~/bucket/runs.tar; fi
trap 'tar cf ~/bucket/runs.tar --exclude "*.zip" runs; cp runs/*.zip ~/bucket' EXIT
