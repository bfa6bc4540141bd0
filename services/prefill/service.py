"""A prefill worker: computes prompts and hands their state over."""

from services.prefill.desk import PrefillDesk
from shared.engine.api import Engine
from shared.runtime.deps import Deps
from shared.transfer.link import Link
from shared.worker.service import WorkerService


class PrefillService(WorkerService):
    role = "prefill"

    def make_desk(self, deps: Deps, engine: Engine, link: Link) -> PrefillDesk:
        return PrefillDesk(deps, engine, link)
