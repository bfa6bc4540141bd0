#!/usr/bin/env bash
# Proves docker-compose.yml against the engine that DOCKER_HOST names: builds, starts two of each, asks over shm and over
# tcp, scales decode to three under load, takes all of it down, and says how long each stage took.
#
#   ops/compose_check.sh [--wheelhouse DIR] [--clients N] [--keep]
#
# --wheelhouse: a directory of wheels that the builds search before any index (or WHEELHOUSE=DIR). With a torch among
# them no further index is asked for one. --keep: leave the cluster running, and the images.
# The build's network, its indexes and the base image are those of docker-compose.yml: BATON_BUILD_NETWORK=host,
# PIP_INDEX_URL, TORCH_INDEX_URL, BASE_IMAGE, …
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=${WHEELHOUSE:-} clients=6 keep=
while [ $# -gt 0 ]; do
    case $1 in
    --wheelhouse) wheels=$2 && shift 2 ;;
    --clients) clients=$2 && shift 2 ;;
    --keep) keep=yes && shift ;;
    *) sed -n '2,/^set/{/^#/p}' "$0" >&2 && exit 2 ;;
    esac
done

export COMPOSE_PROJECT_NAME=baton-check-$$ BATON_TAG=check-$$ COMPOSE_PROFILES=cpu
export BATON_PORTS=${BATON_PORTS:-18000-18009}
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
host=127.0.0.1
case ${DOCKER_HOST:-} in tcp://* | ssh://*)
    host=${DOCKER_HOST#*://} && host=${host#*@} && host=${host%%[:/]*}
    export BATON_BIND=${BATON_BIND:-0.0.0.0}
    ;;
esac
scratch=$(mktemp -d)
copied=
loader=

clean() {
    status=$?
    trap - EXIT INT TERM
    if [ -n "$loader" ]; then kill "$loader" 2>/dev/null || true; fi
    if [ "$status" != 0 ]; then "${compose[@]}" ps -a && "${compose[@]}" logs --tail 40 || true; fi
    if [ -z "$keep" ]; then "${compose[@]}" down -v --remove-orphans --rmi all >/dev/null 2>&1 || true; fi
    if [ -n "$copied" ]; then rm -rf wheelhouse; fi
    rm -rf "$scratch"
    exit "$status"
}
trap clean EXIT
trap 'exit 130' INT TERM

table=
stage() { # NAME COMMAND…: runs it and notes how long it took
    local name=$1 began=$EPOCHREALTIME
    shift
    echo "== $name"
    "$@"
    local took_ms=$(((${EPOCHREALTIME/[.,]/} - ${began/[.,]/}) / 1000))
    table+=$(printf '%6d.%d s  %s' $((took_ms / 1000)) $((took_ms % 1000 / 100)) "$name")$'\n'
}
fail() { echo "compose_check: $*" >&2 && exit 1; }
probe() { python3 ops/compose_probe.py "$@"; }

build() {
    if [ -n "$wheels" ]; then
        [ -d "$wheels" ] || fail "there is no directory $wheels"
        if [ ! -e wheelhouse ]; then copied=yes && mkdir wheelhouse && cp -L "$wheels"/*.whl wheelhouse/; fi
        if compgen -G 'wheelhouse/torch-*.whl' >/dev/null; then export TORCH_INDEX_URL=; fi
    fi
    "${compose[@]}" --progress "${BUILD_PROGRESS:-quiet}" build
}

images() {
    local name bytes
    for name in nats gateway kvstore worker model; do
        bytes=$(docker image inspect -f '{{.Size}}' "baton-$name:$BATON_TAG")
        printf '  %-8s %5d MB\n' "$name" $((bytes / 1000000))
        [ "$(docker image inspect -f '{{.Config.User}}' "baton-$name:$BATON_TAG")" = 10001:10001 ] || fail "$name runs as root"
    done
    for name in gateway kvstore; do
        docker run --rm --network none "baton-$name:$BATON_TAG" python -c \
            'import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ("torch", "numba"))))' || fail "$name holds torch"
    done
}

start() { # [OPTIONS…]: returns once every container is healthy
    "${compose[@]}" --progress quiet up -d --no-build --wait --wait-timeout 600 \
        --scale prefill=2 --scale decode="${decode:-2}" --scale gateway=2 --scale kvstore=2 "$@"
}

gateways() { # the URL of each gateway, with commas
    local index
    for index in 1 2; do
        echo "http://$host:$("${compose[@]}" port --index $index gateway 8000 | sed 's/.*://')"
    done | paste -sd,
}

settled() {
    local url
    for url in ${1//,/ }; do
        probe roles "$url" gateway=2 prefill=2 decode="${decode:-2}" kvstore=2
    done
}

ask_all() { # BACKEND
    local url
    for url in ${urls//,/ }; do probe ask "$url" "$1" "$scratch/answers.json"; done
}

scale_under_load() {
    probe load "$urls" "$clients" "$scratch" >"$scratch/load.txt" 2>&1 &
    loader=$!
    until [ -e "$scratch/started" ]; do sleep 0.1; done
    probe shared "${urls%%,*}" 2
    decode=3 start --no-recreate
    decode=3 settled "$urls"
    probe shared "${urls%%,*}" 3
    touch "$scratch/stop"
    local status=0
    wait "$loader" || status=$?
    loader=
    cat "$scratch/load.txt"
    [ "$status" = 0 ] || fail "requests failed while decode was scaled"
}

down() {
    local of_project="label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" volumes left name
    volumes=$(docker ps -aq --filter "$of_project" | xargs docker inspect -f '{{range .Mounts}}{{println .Name}}{{end}}' | sort -u)
    "${compose[@]}" --progress quiet down -v --remove-orphans
    left=$(docker ps -aq --filter "$of_project" && docker network ls -q --filter "$of_project")
    for name in $volumes; do left+=$(docker volume ls -q --filter "name=^$name\$"); done
    [ -z "$left" ] || fail "left behind: $left"
}

stage "build" build
stage "images" images
stage "start: nats, model, two of each worker" start
urls=$(gateways)
stage "all see all" settled "$urls"
stage "completions over shm" ask_all shm
export BATON_TRANSFER=tcp
stage "start again, with BATON_TRANSFER=tcp" start
urls=$(gateways)
settled "$urls"
stage "completions over tcp" ask_all tcp
unset BATON_TRANSFER
stage "and back" start
urls=$(gateways)
settled "$urls"
stage "decode from 2 to 3 under load of $clients clients" scale_under_load
if [ -z "$keep" ]; then stage "down" down; fi
echo
printf '%s' "$table"
echo "All is well."
