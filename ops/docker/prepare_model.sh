#!/bin/sh
# Prepares $MODEL in the volume that all share, leaves it under one fixed name, and compiles the kernels.
# MODEL: what `baton models prepare` takes, or the name of a file or directory in /input.
set -eu

model=$MODEL
if [ -e "/input/$model" ]; then
    model=/input/$model
fi
directory=$(baton models prepare "$model" ${BATON_WEIGHTS:+--weights "$BATON_WEIGHTS"})
ln -sfn "$directory" "$BATON_CACHE_DIR/model.new"
mv -T "$BATON_CACHE_DIR/model.new" "$BATON_CACHE_DIR/model"
if [ ! -e "$NUMBA_CACHE_DIR/warm" ]; then
    echo "compiling the CPU's kernels"
    mkdir -p "$NUMBA_CACHE_DIR"
    python -c 'import kernels.cpu.copy_runs; from kernels.cpu.ops import warm_up; warm_up()'
    touch "$NUMBA_CACHE_DIR/warm"
fi
echo "$directory is ready"
