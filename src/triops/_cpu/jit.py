"""How a CPU kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from triops._cpu.cache import keep_compiled


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.njit` as every CPU kernel and helper uses it: no GIL, IEEE arithmetic, cached on disk.

    A function that Python calls writes into arrays that it is given and returns nothing or numbers: Numba makes a
    returned array by a function in Python, and an interrupt that arrives there comes out as another error.
    """
    kernel: Any = numba.njit(nogil=True, error_model="numpy")(function)
    keep_compiled(kernel)
    return kernel  # type: ignore[no-any-return]
