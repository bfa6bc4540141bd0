"""The two implementations that tests of the CPU's kernels compare, and the shapes they choose from."""

from hypothesis import settings
from hypothesis import strategies as st

from kernels.cpu.ops import CpuOps
from kernels.ops import Ops
from kernels.reference import ReferenceOps

CPU: Ops = CpuOps()
REFERENCE: Ops = ReferenceOps()

few = settings(max_examples=25, deadline=None, derandomize=True)

decode_row = st.integers(1, 90).map(lambda context: (1, context))
prefill_row = st.tuples(st.integers(2, 40), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))
batches = st.lists(st.one_of(decode_row, prefill_row), min_size=1, max_size=5)
shapes = {
    "lengths": batches,
    "page_tokens": st.integers(1, 32),
    "num_kv_heads": st.integers(1, 3),
    "group": st.integers(1, 8),
    "head_dim": st.integers(1, 16).map(lambda eighths: 8 * eighths),
    "seed": st.integers(0, 1000),
}
