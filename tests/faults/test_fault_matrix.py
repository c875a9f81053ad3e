"""When something goes wrong on one rank all end in time, and say where they were."""

import matrix
import pytest

from gradweave.errors import LabError
from gradweave.lab import Cluster, ClusterSpec

# All stages in `make test-faults`.
STAGES = ("trying",)
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("faults")]


@pytest.fixture(scope="module")
def faults():
    """Ranks that have imported torch, which is most of what this takes."""
    try:
        with Cluster(ClusterSpec(nodes=1)):
            pass
    except LabError as error:
        if "namespaces are forbidden" not in str(error):
            raise
        pytest.skip(str(error))
    with matrix.faults() as found:
        yield found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wrapper", matrix.WRAPPERS)
@pytest.mark.parametrize("case", matrix.CASES)
def test_a_fault(faults, case, wrapper, stage):
    """Seconds: some cases are noticed by the group's time-out."""
    row = faults.run(case, wrapper, stage)
    assert row.problem is None, row
