"""A decode worker: takes prompts over from prefill workers, or computes them itself, and generates."""

from services.decode.desk import DecodeDesk
from shared.engine.api import Engine, StepOutput
from shared.runtime.deps import Deps
from shared.transfer.link import Link
from shared.worker.service import WorkerService
from shared.worker.stores import Stores


class DecodeService(WorkerService):
    role = "decode"

    def make_desk(self, deps: Deps, engine: Engine, link: Link, stores: Stores | None) -> DecodeDesk:
        return DecodeDesk(deps, engine, link, stores)

    def on_step(self, output: StepOutput) -> None:
        if isinstance(self.desk, DecodeDesk):
            self.desk.outbox.on_step(output)
