"""Everything here needs other people's libraries: `make test-integrations` runs it alone."""

import multiprocessing
from importlib.util import find_spec

import pytest
import ranks

LIBRARIES = [name for name in ("lightning", "accelerate", "transformers") if find_spec(name)]
# Ranks come from the fork server of `ranks`, which imports what takes seconds once for all of them.
multiprocessing.set_forkserver_preload(
    [
        *ranks.PRELOADED,
        *LIBRARIES,
        *(["lightning.pytorch"] if "lightning" in LIBRARIES else []),
        *(["transformers.trainer"] if "transformers" in LIBRARIES else []),
    ]
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.integrations)
