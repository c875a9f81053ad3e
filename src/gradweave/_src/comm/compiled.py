"""Loops compiled by numba, without Python's lock.

Note: compiled code is kept
    Compiling takes seconds. numba keeps the result beside the function's file, or in the user's
    cache folder where that cannot be written. It writes a new file first and then renames it, so
    that processes may compile at once, and compares CPU and source before it uses a file. It
    compares the source of that file only, so what a compiled function uses must stand there, too: a
    change in another file would go unnoticed. Where no folder can be written, every process
    compiles.
"""

from typing import TypeVar, cast

import numba

Function = TypeVar("Function")


def compiled(function: Function) -> Function:
    """Compile a function to run without the lock, which the training script needs meanwhile."""
    try:
        return cast("Function", numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no folder can be written; see Note: compiled code is kept
        return cast("Function", numba.njit(nogil=True)(function))
