"""What a request asks of the workers, by what its client has already and by what lies where."""

from dataclasses import replace

from services.gateway.costs import Estimate, Rates
from services.gateway.flow_settings import GatewayFlowSettings
from services.gateway.generation import GenerationRequest
from services.gateway.history import History
from services.gateway.prefixes import STORES, Beginning
from services.gateway.router import Demand


class Asking:
    """Of one request. identity: of the model that began its answer. avoid: peers that failed it before."""

    def __init__(
        self,
        request: GenerationRequest,
        history: History,
        beginning: Beginning,
        rates: Rates,
        settings: GatewayFlowSettings,
        identity: str | None,
    ) -> None:
        self._request = request
        self._history = history
        self._beginning = beginning
        self._rates = rates
        self._settings = settings
        self.identity = identity
        self.avoid: frozenset[str] = frozenset()

    @property
    def trunk_len(self) -> int:
        """Positions whose state the next attempt needs before its choices go on."""
        return self._history.prefix_len(len(self._request.prompt))

    def estimate(self) -> Estimate:
        return self._rates.estimate(self.trunk_len, self._history.stored)

    def demand(self) -> Demand:
        request, caught_up = self._request, self._history.caught_up()
        held = self._beginning.held()
        may_load = self._history.begun and not (request.strict and request.path != "auto")
        return Demand(
            prompt_len=self.trunk_len,
            num_choices=len(caught_up),
            max_tokens=request.sampling.max_tokens,
            caught_up=caught_up,
            path=request.path,
            strict=request.strict,
            avoid=self.avoid,
            identity=self.identity,
            load=may_load and self.estimate().from_store,
            held=held,
            near=self._settings.near_tokens,
            stored=held.get(STORES, 0),
            fetch=self._least_fetch(),
        )

    def renew(self, demand: Demand) -> Demand:
        """By what others have left where meanwhile."""
        held = self._beginning.held()
        return replace(demand, held=held, stored=held.get(STORES, 0))

    def _least_fetch(self) -> int:
        """As `Demand.fetch`."""
        if self._request.path == "hybrid":
            return self._settings.block_tokens
        return self._rates.least_fetch() if self._request.path == "auto" else 0
