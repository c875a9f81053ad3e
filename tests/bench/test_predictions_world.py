"""Published numbers are read, and predicted from nominal rates as the page says."""

import pytest
from predictions_world import PUBLISHED, Source, sources

DDL = sources()["ddl-benchmarks"]

# Images per second of ResNet-50 by nominal 10 Gbit/s Ethernet, as issue and page have them.
SIMULATED = {
    ("single", 8): 1292,
    ("single", 16): 2518,
    ("single", 32): 4968,
    ("wfbp", 8): 1959,
    ("wfbp", 16): 3301,
    ("wfbp", 32): 5217,
    ("mgwfbp", 8): 2023,
    ("mgwfbp", 16): 4042,
    ("mgwfbp", 32): 8068,
}


@pytest.mark.parametrize(("planner", "workers"), SIMULATED)
def test_resnet50_on_nominal_ethernet(planner: str, workers: int) -> None:
    (row,) = [
        row
        for row in DDL.rows
        if (row.trace, row.network, row.planner, row.workers)
        == ("resnet50", "10gbe", planner, workers)
    ]
    assert round(DDL.predicted(row)) == SIMULATED[planner, workers]
    assert DDL.error(row) == pytest.approx(row.measured / DDL.predicted(row) - 1)


@pytest.mark.parametrize("source", sources().values(), ids=sources())
def test_every_source_says_where_it_is_from_and_has_a_row_that_can_be_predicted(
    source: Source,
) -> None:
    assert source.address
    assert source.assumed
    assert {row.network for row in source.rows} == set(source.networks)
    assert all(network.latency_s > 0 for network in source.networks.values())
    assert source.predicted(source.rows[0]) > 0


def test_there_is_a_file_for_each_source() -> None:
    assert {path.stem for path in PUBLISHED.iterdir()} == set(sources())
