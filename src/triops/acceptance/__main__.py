"""`python -m triops.acceptance` is `triops check`."""

import sys

from triops_cli import main

sys.exit(main(["check", *sys.argv[1:]]))
