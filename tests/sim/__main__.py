"""`python -m tests.sim --seeds 2000`: many seeds, and a table of what they hit."""

import sys

from tests.sim.command import main

if __name__ == "__main__":
    sys.exit(main())
