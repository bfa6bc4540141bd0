#!/bin/sh
# Runs one role, or any other command. A role gets what only its container knows: a name that no other replica has, and
# the address its peers reach it at.
set -eu

if [ -d "$BATON_CACHE_DIR" ] && [ -r /app/kernels.digest ]; then
    # Compiled kernels are good for these sources only: in an image all files have the same time.
    NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$BATON_CACHE_DIR/kernels-$(cat /app/kernels.digest)}
    export NUMBA_CACHE_DIR
fi

role=${1:-}
case $role in
gateway | prefill | decode | kvstore)
    shift
    if [ -z "${BATON_NAME:-}" ]; then
        BATON_NAME=$role-$(hostname | tr '[:upper:]' '[:lower:]' | tr -c 'a-z0-9_\n' - | cut -c 1-32)
        export BATON_NAME
    fi
    case $role in
    prefill | decode | kvstore)
        if [ -z "${BATON_TCP_HOST:-}" ]; then
            BATON_TCP_HOST=$(hostname -i | cut -d ' ' -f 1)
            export BATON_TCP_HOST
        fi
        ;;
    esac
    case $role in
    kvstore)
        # Replicas share one volume: each holds a place in it for as long as it lives, and its successor takes that over.
        place=0
        while exec 9>"$BATON_STATE_DIR/$place.lock" && ! flock --nonblock 9; do place=$((place + 1)); done
        BATON_STATE_DIR=$BATON_STATE_DIR/$place
        export BATON_STATE_DIR
        ;;
    esac
    exec python -m "services.$role" "$@"
    ;;
prepare-model)
    exec /opt/docker/prepare_model.sh
    ;;
*)
    exec "$@"
    ;;
esac
