"""Compiled loops, where they are kept and where they cannot be."""

from importlib.util import find_spec

from needs import missing

if find_spec("numba") is None:
    missing("numba is not installed", whole_module=True)

from gradweave._src.comm import compiled as module
from gradweave._src.comm.compiled import compiled


def test_where_nothing_can_be_cached_it_is_compiled(monkeypatch):
    """numba refuses ``cache`` when no folder can be written."""
    njit_of_numba = module.numba.njit

    def njit(*functions, **options):  # numba decorates functions of its own meanwhile
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit_of_numba(*functions, **options)

    monkeypatch.setattr(module.numba, "njit", njit)
    assert compiled(lambda x: x + 1)(1) == 2
