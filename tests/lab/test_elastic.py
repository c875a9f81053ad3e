"""torchrun starts a training again, and it goes on: recipe, shards and residuals are found again.

Workers that cannot use their agent's store must not: keys of an earlier life stay in it, and
``init_process_group`` hangs or fails now and then, with torch's own wrapper, too.
"""

import re
from pathlib import Path

import pytest
from commands import MOST_S, TORCHRUN, torchrun

from gradweave._src.lab import Cluster, ClusterSpec

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic_training.py"
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
STEPS, EVERY, CRASH = 80, 20, 50


def arguments(folder, wrapper, *more):
    asked = ["--wrapper", wrapper, "--steps", str(STEPS), "--every", str(EVERY)]
    return [str(SCRIPT), str(folder), *asked, *more]


def losses(output):
    """By worker and step, of the last life that came to it."""
    found = re.findall(r"worker (\d+), step (\d+): loss ([\d.]+)", output)
    return {(int(worker), int(step)): loss for worker, step, loss in found}


def run(workers, folder, wrapper, *more, restarts=0):
    """Return the exit code, and what was written, on one machine."""
    asked = (f"--max-restarts={restarts}", *arguments(folder, wrapper, *more))
    done = torchrun(*asked, ranks=workers, environment=ENVIRONMENT)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("wrapper", ["ddp", "sharded", "sparse"])
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path, wrapper):
    code, undisturbed = run(2, tmp_path / "whole", wrapper)
    assert code == 0, undisturbed[-3000:]
    crash = ("--crash-at", str(CRASH))
    code, crashed = run(2, tmp_path / "crashed", wrapper, *crash, restarts=1)
    assert code == 0, crashed[-3000:]
    assert "goes on from step 0" in crashed
    assert crashed.count("goes on from step 40") == 2
    assert len(losses(undisturbed)) == 2 * STEPS // EVERY
    assert losses(crashed) == losses(undisturbed)


@pytest.mark.parametrize("wrapper", ["ddp", "sharded"])
def test_the_next_life_begins_with_the_plan_that_was_found(tmp_path, wrapper):
    """Half a minute: planning has to settle before the checkpoint."""
    asked = ("--steps", "260", "--every", "240", "--crash-at", "250")
    code, output = run(2, tmp_path, wrapper, *asked, restarts=1)
    assert code == 0, output[-3000:]
    assert len(re.findall(r"goes on from step 0, planning: (?!settled)", output)) == 2
    assert output.count("goes on from step 240, planning: settled") == 2


@pytest.mark.parametrize("wrapper", ["sharded", "sparse"])
def test_fewer_workers_go_on_where_more_have_stopped(tmp_path, wrapper):
    code, stopped = run(3, tmp_path, wrapper, "--crash-at", str(CRASH))
    assert code != 0
    assert stopped.count("goes on from step 0") == 3
    code, output = run(2, tmp_path, wrapper)
    assert code == 0, output[-3000:]
    assert output.count("goes on from step 40") == 2
    assert {step for _, step in losses(output)} == {60, 80}


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_agents_on_nodes_start_again(namespaces, tmp_path, rendezvous):
    """Also that one job runs there, of as many workers as nodes."""
    lines = []
    command = [
        *TORCHRUN,
        f"--rdzv-backend={rendezvous}",
        "--nproc-per-node=1",
        "--max-restarts=2",
        *arguments(tmp_path, "ddp", "--crash-at", str(CRASH)),
    ]
    with Cluster(ClusterSpec(nodes=2, rate="1gbit")) as cluster:
        job = cluster.start_agents(command, env=ENVIRONMENT, on_line=lines.append)
        result = job.wait(MOST_S)
    output = "\n".join(line.text for line in lines)
    assert result.exit_code == 0, output[-3000:]
    for worker in (0, 1):
        assert f"worker {worker} of 2 goes on from step 0" in output
        assert f"worker {worker} of 2 goes on from step 40" in output
        assert (worker, STEPS) in losses(output)
