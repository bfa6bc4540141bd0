"""State moved between two groups of workers that cut it differently: other tensor-parallel sizes, other page sizes,
other rings. A pure function over components: it knows no sockets, no tickets and no model.

    sharding   which heads a rank holds, and whether two groups hold the same state at all
    routes     which source rank sends which heads to which target rank
    route      what travels on one of them, and where it lies on either side
    spans      the byte arithmetic of one rank's pool
    fit        the same for two pools that were given, as a pair of sidecars has them

What one rank sends another for one chunk is one contiguous piece: the sender gathers it, the receiver scatters it.
Where all of a rank's heads go the same way its own pages serve as the piece, and only the receiver has something to do.
"""

from shared.state.remap.fit import Fit, fit_between
from shared.state.remap.route import Chunk, Route
from shared.state.remap.routes import routes
from shared.state.remap.sharding import ShardedState, check_fit, heads_held
from shared.state.remap.spans import Place, copy_spans

__all__ = [
    "Chunk",
    "Fit",
    "Place",
    "Route",
    "ShardedState",
    "check_fit",
    "copy_spans",
    "fit_between",
    "heads_held",
    "routes",
]
