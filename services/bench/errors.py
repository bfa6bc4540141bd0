"""Why a benchmark could not be run."""


class BenchError(Exception):
    """One or two sentences for the person at the terminal: what is wrong, and what to do."""
