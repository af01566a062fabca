"""Growth of labelled regions over a mask, compiled: a search with a queue, which no tensor formulation does."""

from __future__ import annotations

from triops._cpu.jit import jit
from triops._plain import regions

spread = jit(regions.spread)
