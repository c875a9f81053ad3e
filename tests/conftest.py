import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from gradweave import Network, Tensor, Trace
from gradweave._src.costs import Link, flat

# Ranks share the cores, as threads or as processes: threads of each of them would only spin. Before
# torch is imported, and for all that is started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Two shared cores: a slow example is a busy machine, not a failure. `make test-long` draws more.
settings.register_profile("short", deadline=None, max_examples=20)
settings.register_profile("long", deadline=None, max_examples=100)
settings.load_profile("short")

SHARED = Path(__file__).parents[2] / "shared"

MakeTrace = Callable[..., Trace]

_FROZEN = {"modules": 0}
gc.disable()  # until tests begin: imports leave no garbage, and to look for it takes a second


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        return
    gc.enable()  # in the process that starts others, and imports no tests


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_runtest_setup() -> None:
    """Keep what is alive out of collections of garbage, whenever many modules were imported.

    Tests that count what is left behind collect often, and would look at a million objects that
    stay until the end.
    """
    if len(sys.modules) > _FROZEN["modules"] + 200:
        gc.collect()
        gc.freeze()
        _FROZEN["modules"] = len(sys.modules)


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Ranks load them from numba's cache: to compile takes longer than a rank waits for another."""
    from kernels import compile_one_by_one  # noqa: PLC0415 most tests need no torch

    compile_one_by_one()


@pytest.fixture(scope="session")
def measurements() -> Path:
    """The measurements some presets come from; they stand beside our own checkouts only."""
    folder = SHARED / "data" / "traces"
    if not folder.is_dir():
        pytest.skip("the original measurements are not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def small_trace() -> Trace:
    return Trace(
        name="small",
        origin="measured",
        source="made up",
        batch_size=2,
        tensors=(
            Tensor(name="c", elements=100, bytes_per_element=4, ready_s=1.0, forward_s=0.5),
            Tensor(name="b", elements=1, bytes_per_element=4, ready_s=1.0, forward_s=0.0),
            Tensor(name="a", elements=250, bytes_per_element=4, ready_s=3.0, forward_s=1.5),
        ),
    )


@pytest.fixture(scope="session")
def linked_network() -> Network:
    link = Link(latency_s=0.25, s_per_byte=0.001, sum_s_per_byte=0.0005)
    return Network(name="linked", source="made up", links=flat(link))
