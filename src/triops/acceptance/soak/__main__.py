"""`python -m triops.acceptance.soak`."""

import sys

from triops.acceptance.soak.command import main

if __name__ == "__main__":  # worker processes import this file too
    sys.exit(main())
