"""A store that has what an interrupted answer needs and does not bring it, or that gets state which lost something on
its way. The store itself is a few lines here; everything around it is real."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from services.decode.desk import DecodeDesk
from services.gateway.flow import RequestFlow
from services.gateway.flow_settings import GatewayFlowSettings
from services.gateway.generation import DEFAULT_TENANT, GenerationRequest
from shared.protocol.messages import Commit, CommitReply
from shared.protocol.wire import KvPrecision
from shared.runtime.errors import error_from_code
from shared.store.client import StoreClient
from shared.store.keys import chain
from shared.store.runs import BlockRun, Found, PutOutcome
from shared.worker.stores import Stores
from tests.sim.cluster import Cluster
from tests.sim.processes import Process, Worker
from tests.sim.test_flows import oracle
from tests.sim.test_recovery import GREEDY, PROMPT, at_tokens, serving
from tests.sim.virtual_time import run_virtual

BLOCK = 4


@dataclass
class Store:
    """One for all decode workers, as their client of it. says: the code of its answer to every load."""

    says: str = "store_failed"
    keys: list[bytes] = field(default_factory=list)
    num_asked: int = 0
    block_tokens: int = BLOCK
    are_there: bool = True

    async def put(self, run: BlockRun, pages: Sequence[int], tenant: str) -> tuple[PutOutcome, ...]:
        self.keys += [key for key in run.keys if key not in self.keys]
        return (PutOutcome("store", len(run.keys), len(run.keys)),)

    async def lookup(self, run: BlockRun, answer_s: float | None = None) -> Found | None:
        held = next((k for k, key in enumerate(run.keys) if key not in self.keys), len(run.keys))
        return Found("store", "store-1", 1, run.part(0, held), 0, (), 1e9) if held else None

    async def load(self, *_: object, **__: object) -> None:
        self.num_asked += 1
        raise error_from_code(self.says, "said the store")

    async def release(self, found: Found) -> None: ...

    def serve(self, process: Process) -> None:
        """Decode workers have it from now on."""
        if isinstance(process, Worker) and isinstance(process.desk, DecodeDesk):
            stores = Stores(process.deps, process.engine, cast(StoreClient, self))
            process.desk._flow = replace(process.desk._flow, stores=stores)


def spied(cluster: Cluster) -> list[RequestFlow]:
    """The gateway's side of every request from now on."""
    made: list[RequestFlow] = []
    generate = cluster.gateway.flow.generate

    def generate_and_tell(request: GenerationRequest) -> RequestFlow:
        made.append(generate(request))
        return made[-1]

    cluster.gateway.flow.generate = generate_and_tell  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    "code", ["store_failed", "queue_full", "shutting_down", "unknown_room", "deadline_exceeded", "corrupt_state"]
)
def test_whatever_a_store_says_instead_of_a_load_is_nobodys_failure(code: str) -> None:
    """The limits are such that one more failure, or one more recovery, would end the answer."""

    async def scenario() -> None:
        store = Store(says=code)
        async with Cluster(decodes=3, on_built=store.serve) as cluster:
            flow = cluster.gateway.flow
            flow.settings = GatewayFlowSettings(max_attempts=2, max_recoveries=1)
            flow.rates.load_fixed_s = 0.0
            flows, lost = spied(cluster), list[str]()

            def lose() -> None:
                lost.append(serving(cluster).peer)
                serving(cluster).kill_now()

            answer = await cluster.ask(PROMPT, on_batch=at_tokens(6, lose), **GREEDY)
            assert answer.error is None
            assert answer.tokens == await oracle(PROMPT, **GREEDY)
            assert store.num_asked == 1, "it is not asked again for what it did not bring"
            assert flows[0]._asking.avoid == set(lost), "only who is gone is avoided"
            (loss,) = answer.timings["recovery"]
            assert (loss["cause"], loss["path"], answer.timings["attempts"]) == ("peer_lost", "remote", 3)
            counters = cluster.gateway.counters
            assert [counters[name] for name in ("recoveries", "recoveries_given_up")] == [1, 0]
            assert not cluster.gateway.rooms.breakers.report(cluster.gateway.clock.now())
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("asked", "came_by", "named"), [("lossless", "lossless", "raw"), ("int8", "int8", "int8"), ("auto", "fp8", "fp8")]
)
def test_what_came_by_a_lossy_format_is_stored_under_its_name(
    monkeypatch: pytest.MonkeyPatch, asked: KvPrecision, came_by: str, named: str
) -> None:
    """Also where the record does not say so of each component."""
    on_commit = DecodeDesk.on_commit

    async def on_lossy_commit(desk: DecodeDesk, record: Commit) -> CommitReply:
        return await on_commit(desk, record.model_copy(update={"wire_format": came_by, "on_wire": ()}))

    monkeypatch.setattr(DecodeDesk, "on_commit", on_lossy_commit)

    async def scenario() -> None:
        store = Store()
        async with Cluster(on_built=store.serve) as cluster:
            whole: dict[str, Any] = {"path": "remote", "strict": True, "kv_precision": asked}
            answer = await cluster.ask(PROMPT, **whole, **GREEDY)
            assert answer.error is None
            await cluster.settle()
            (decode,) = cluster.decodes
            assert isinstance(decode.desk, DecodeDesk)
            stores = decode.desk._flow.stores
            assert stores is not None
            tokens = [*PROMPT, *answer.tokens[0]][:-1]
            assert store.keys == list(chain(stores.lineage(DEFAULT_TENANT, named), tokens))
            assert len(store.keys) == len(tokens) // BLOCK

    run_virtual(scenario())
