"""A link that is slower than others is told from them."""

import msgspec
import pytest
from lab_watching import LIMIT_S

from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.phases import Phases
from gradweave._src.session.link_times import Transfer, link_times
from gradweave._src.session.slow_ranks import Typical, slow_ranks

BURSTS = """
import sys
from socket import gethostname

import msgspec
import torch.distributed as dist

from gradweave._src.comm.small_messages import gather_text
from gradweave._src.measure.link_bursts import link_transfers

dist.init_process_group("gloo")
group = dist.group.WORLD
hosts = gather_text(group, gethostname())
found = link_transfers(group, hosts)
if group.rank() == 0:
    print(msgspec.json.encode(found).decode())
dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_slow_link_is_found_among_others(namespaces, ranks_program):
    """Takes some seconds, most of them to import torch; a fifth of the rate is no accident."""
    answers = []

    def take(line):
        if line.rank == 0 and not line.is_error:
            answers.append(msgspec.json.decode(line.text, type=list[Transfer]))

    with Cluster(ClusterSpec(nodes=3, rate="200mbit")) as cluster:
        cluster.set_rate(1, "40mbit")
        result = cluster.start(ranks_program(BURSTS), on_line=take).wait(4 * LIMIT_S)
    assert result.exit_code == 0
    links = link_times(answers[0])
    assert list(links) == [0, 1, 2]
    step = Phases(input_s=0.1, forward_s=0.1, backward_s=0.1, network_s=0.1)
    (found,) = slow_ranks([Typical(parts=(step,))] * 3, links=links)
    assert (found.rank, found.phase) == (1, "network")
