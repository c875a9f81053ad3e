"""Clusters for tests, where the machine allows them."""

import sys

import pytest
from needs import missing

from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster, ClusterSpec


@pytest.fixture(scope="session")
def namespaces():
    """Tests are skipped where a user may not make namespaces, unless CI is set."""
    try:
        with Cluster(ClusterSpec(nodes=1)):
            pass
    except LabError as error:
        if "namespaces are forbidden" not in str(error):
            raise
        missing(str(error))


@pytest.fixture(scope="module")
def two_by_two(namespaces):
    """Two nodes of two ranks, for tests that leave it as it was."""
    with Cluster(ClusterSpec(nodes=2, ranks_per_node=2, rate="1gbit")) as cluster:
        yield cluster


@pytest.fixture
def ranks_program(tmp_path):
    """A command that runs this Python source as every rank."""

    def command(source, *arguments):
        file = tmp_path / "rank.py"
        file.write_text(source)
        return [sys.executable, str(file), *arguments]

    return command
