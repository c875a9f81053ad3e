"""Everything here needs other people's libraries: `make test-integrations` runs it alone."""

from importlib.util import find_spec

import commands
import pytest

LIBRARIES = [name for name in ("lightning", "accelerate", "transformers") if find_spec(name)]
# Imported once for all ranks, before they are forked: it takes seconds.
commands.ALSO_PRELOADED += [
    *LIBRARIES,
    *(["lightning.pytorch"] if "lightning" in LIBRARIES else []),
    *(["transformers.trainer"] if "transformers" in LIBRARIES else []),
]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.integrations)
