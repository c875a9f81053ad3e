"""What each rank of ``gradweave calibrate`` runs: ``python -m …calibration_job FILE``."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from gradweave._src.bench.calibration import CalibrationAnswer, CalibrationQuestion
from gradweave._src.bench.jobs import answer, asked
from gradweave._src.bench.ranks import default_group, node_topology
from gradweave._src.comm import Communicator
from gradweave._src.comm.groups import same_ranks
from gradweave._src.comm.lanes import LANES
from gradweave._src.comm.small_messages import group_device, largest
from gradweave._src.measure.network import calibrate
from gradweave._src.network import Network
from gradweave._src.planning import OPERATIONS
from gradweave._src.session.compression import with_compression_price
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.settings import settings_for
from gradweave._src.sparse.timing import MOST_TIMED, exchange_cost, selection_s_per_element


def in_default_group(
    question: CalibrationQuestion, *, advance: Callable[[], None]
) -> Network | None:
    """In the group that the environment describes; rank 0 has the answer."""
    with default_group() as group:
        return calibrated(question, group, advance=advance)


def calibrated(
    question: CalibrationQuestion, group: dist.ProcessGroup, *, advance: Callable[[], None]
) -> Network | None:
    """Every rank's share; rank 0 has the answer."""
    topology = node_topology(group, nodes_per_rack=question.nodes_per_rack)
    # Making a group takes a while.
    is_sharded = any(way.operation in OPERATIONS["both"] for way in question.ways)
    network = calibrate(
        group,
        name=question.name,
        ways=question.ways,
        largest_bytes=question.largest_bytes,
        repeats=question.repeats,
        communicator=Communicator(group, topology=topology),
        other_lanes=[
            Communicator(same_ranks(group), topology=topology)
            for _ in range(LANES - 1 if is_sharded else 0)
        ],
        keeps_slow=question.keeps_slow,
        advance=advance if group.rank() == 0 else lambda: None,
    )
    for compression in question.compressions:
        mine_s = selection_s_per_element(
            MOST_TIMED,
            like=torch.zeros(1),
            density=compression.density,
            settings=settings_for(compression),
        )
        (slowest_s,) = largest(group, [mine_s], device=group_device(group))
        network = with_compression_price(
            network,
            compression,
            selection_s_per_element=slowest_s,
            exchange=exchange_cost(
                Exchanger(group), exchange=compression.exchange, density=compression.density
            ),
            workers=group.size(),
        )
    return network if group.rank() == 0 else None


if __name__ == "__main__":
    found = in_default_group(
        asked(CalibrationQuestion), advance=lambda: answer(CalibrationAnswer())
    )
    if found is not None:
        answer(CalibrationAnswer(network=found))
