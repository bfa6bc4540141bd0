#!/bin/sh
# nats-server: for everybody who reaches it, or, where BATON_NATS_USER and BATON_NATS_PASSWORD are set, for nobody else.
set -eu
umask 077

quoted() {
    printf '"%s"' "$(printf '%s' "$1" | sed 's/[\\"]/\\&/g')"
}

config=${NATS_CONFIG:-/tmp/nats.conf}
{
    echo 'host: "0.0.0.0"'
    echo 'port: 4222'
    echo 'http_port: 8222'
    printf 'jetstream { store_dir: %s }\n' "$(quoted "${NATS_STORE:-/var/lib/nats}")"
    if [ -n "${BATON_NATS_USER:-}" ]; then
        printf 'authorization { user: %s, password: %s }\n' \
            "$(quoted "$BATON_NATS_USER")" "$(quoted "$BATON_NATS_PASSWORD")"
    fi
} >"$config"
exec nats-server --config "$config" "$@"
