"""How long a burst of what is not urgent may be. The settings, which refuse what cannot work, and the gate agree."""


def polite_burst(burst_bytes: int, window_bytes: int) -> int:
    """Half of what may be on its way, so that this is never empty and hardly exceeded. window_bytes: 0: any."""
    return min(burst_bytes, max(1, window_bytes // 2)) if window_bytes else burst_bytes
