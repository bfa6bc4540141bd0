"""exp that the compiler can vectorise: a call into libm a score would cost more than the attention itself."""

import numpy as np

from kernels.cpu.threads import inlined

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)


@inlined
def exp_shifted(scores: np.ndarray, count: int) -> tuple[np.float32, np.float32]:
    """Turns scores[:count] into exp(score - max) in place (Cephes' expf, 2 ulp); returns (max, sum of the
    exps)."""
    top = scores[0]
    for t in range(1, count):
        top = max(top, scores[t])
    total = np.float32(0)
    for t in range(count):
        shifted = scores[t] - top
        bounded = shifted if shifted > _LOWEST else _LOWEST
        n = np.float32(np.int32(np.floor(bounded * _LOG2_E + np.float32(0.5))))
        x = _LOWEST if shifted < _LOWEST else shifted  # unlike `bounded`, keeps a NaN
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        p = p * r * r + r + np.float32(1)
        power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        value = p * power
        scores[t] = value
        total += value
    return top, total
