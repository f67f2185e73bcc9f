"""`python -m oomc` is the command line."""

import sys

from oomc.cli import main

if __name__ == "__main__":
    sys.exit(main())
