"""Why a local cluster could not be started."""


class LaunchError(Exception):
    """One or two sentences for the person at the terminal: what is wrong, and what to do."""
