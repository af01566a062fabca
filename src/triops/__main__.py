"""`python -m triops` is `triops`."""

import sys

from triops_cli import main

sys.exit(main())
