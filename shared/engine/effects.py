"""What has to be told after a step, collected by the scheduler and passed on by the engine."""

from dataclasses import dataclass, field

from shared.engine.api import ChunkDone, GroupFailed, StepOutput, TokenOut
from shared.transfer.link import TicketKey


@dataclass(slots=True)
class StepEffects:
    """What has to be told: chunks to those who iterate a prefill; tokens, failures, and who gave way, came back or is
    parked to the listener; `released` groups are gone, their pages free."""

    chunks: list[tuple[TicketKey, ChunkDone]] = field(default_factory=list)
    tokens: list[TokenOut] = field(default_factory=list)
    failed: list[GroupFailed] = field(default_factory=list)
    preempted: list[TicketKey] = field(default_factory=list)
    resumed: list[TicketKey] = field(default_factory=list)
    parked: list[TicketKey] = field(default_factory=list)
    released: list[TicketKey] = field(default_factory=list)

    def output(self) -> StepOutput:
        return StepOutput(
            tuple(self.tokens), tuple(self.failed), tuple(self.preempted), tuple(self.resumed), tuple(self.parked)
        )
