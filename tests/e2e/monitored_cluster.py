"""`baton` with one thing more: the launcher's nats-server says on a port of its own what it holds. Its ports file
names that port."""

from services import cli
from shared.bus.server import NatsServer

config = NatsServer._config
NatsServer._config = lambda server: config(server) + 'http: "127.0.0.1:-1"\n'  # type: ignore[method-assign]

cli.main()
