"""A prefill worker: computes prompts and hands their state over."""

from services.prefill.desk import PrefillDesk
from services.prefill.metrics import HandoffMetrics
from services.prefill.parts import PrefillFlowSettings
from shared.engine.api import Engine, StepOutput
from shared.runtime.deps import Deps
from shared.runtime.settings import PrefillSettings
from shared.transfer.link import Link
from shared.worker.service import WorkerService
from shared.worker.stores import Stores


class PrefillService(WorkerService):
    role = "prefill"
    settings: PrefillSettings

    def make_desk(self, deps: Deps, engine: Engine, link: Link, stores: Stores | None) -> PrefillDesk:
        settings = PrefillFlowSettings(
            commit_s=self.settings.commit_timeout_s,
            optimistic_attempts=self.settings.optimistic_attempts,
            overlap=self.settings.overlap,
            layers_per_send=self.settings.layers_per_send,
        )
        return PrefillDesk(deps, engine, link, settings, HandoffMetrics(self.registry).observe, stores)

    def on_step(self, output: StepOutput) -> None:
        if isinstance(self.desk, PrefillDesk):
            self.desk.on_step(output)
