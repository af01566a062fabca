"""`python -m triops.acceptance`."""

import sys

import triops  # noqa: F401
from triops.acceptance.command import main

sys.exit(main())
