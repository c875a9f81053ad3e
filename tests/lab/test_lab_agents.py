"""torchrun on a cluster is one job: an agent on each node, told of the others, or one line."""

import stat
import sys

import pytest

from gradweave._src.cli import main
from gradweave._src.errors import RequestError
from gradweave._src.lab import ClusterSpec
from gradweave._src.lab.agents import check_agents, is_torchrun, node_environments
from gradweave._src.lab.spec import MeetingPoint

TWO = ClusterSpec(nodes=2)
THERE = MeetingPoint("10.77.0.1", 29500, "eth0")
MODULE = ["python3.12", "-m", "torch.distributed.run"]


@pytest.mark.parametrize("launcher", [["torchrun"], ["/opt/bin/torchrun"], MODULE])
def test_torchrun_is_recognised(launcher):
    assert is_torchrun([*launcher, "--nproc-per-node", "2", "train.py"])


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["python", "train.py", "torchrun"],
        ["python", "-m", "train"],
        ["sh", "-c", "torchrun"],
        ["python"],
    ],
)
def test_other_programs_are_not(command):
    assert not is_torchrun(command)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--standalone"], "--standalone makes each node a world of its own; leave it out"),
        (["--nproc_per_node", "2", "--node_rank=1"], "each node has a rank of its own"),
        (["--nnodes", "1"], "torchrun is to wait for 1 nodes, and there are 2"),
        (["--nnodes=1:3"], "torchrun is to wait for 3 nodes, and there are 2"),
    ],
)
@pytest.mark.parametrize("launcher", [["torchrun"], MODULE])
def test_what_could_not_meet_is_refused(launcher, options, complaint):
    with pytest.raises(RequestError, match=complaint):
        check_agents([*launcher, *options, "train.py"], TWO)
    check_agents([*launcher, "--nproc-per-node", "2", "train.py", *options], TWO)  # the script's


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_what_the_command_says_of_its_nodes_may_stand(nodes):
    check_agents(["torchrun", "--nnodes", nodes, "--no-python", "train"], TWO)


def test_ranks_are_torchruns_to_start():
    with pytest.raises(RequestError, match="give it --nproc-per-node instead"):
        check_agents(["torchrun", "train.py"], ClusterSpec(nodes=2, ranks_per_node=2))


def test_where_to_meet_is_the_commands_to_say():
    for options, endpoint in (([], "10.77.0.1:29500"), (["--master_addr", "node1"], None)):
        command = ["torchrun", *options, "train.py"]
        found = node_environments(command, TWO, base={"OWN": "1"}, meeting=THERE)
        assert [one["PET_NODE_RANK"] for one in found.values()] == ["0", "1"]
        assert {one.get("PET_RDZV_ENDPOINT") for one in found.values()} == {endpoint}
        assert all(one["OWN"] == "1" and "RANK" not in one for one in found.values())


def test_one_agent_runs_on_each_node(namespaces, capsys, tmp_path):
    """Not torch's: a program of its name that says what it was told."""
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/sh\necho "$(hostname) $PET_NODE_RANK of $PET_NNODES $RANK $@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert main(["lab", "--nodes", "2", "--", str(program), "--nproc-per-node", "3", "x.py"]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        "[node 0] node0 0 of 2  --nproc-per-node 3 x.py",
        "[node 1] node1 1 of 2  --nproc-per-node 3 x.py",
    ]


def test_a_mistake_in_torchruns_options_is_one_line(capsys):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "x.py"]
    assert main(["lab", "--nodes", "2", "--loopback", "--", *command]) == 2
    assert "gradweave lab: --standalone makes each node" in capsys.readouterr().err
