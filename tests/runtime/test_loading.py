"""Data is loaded by other processes, forked or spawned beside our threads, as without them."""

import sys
from pathlib import Path

import pytest

from gradweave._src.lab import Cluster, ClusterSpec

SCRIPT = str(Path(__file__).parent / "loading.py")
MOST_S = 240


def said(how, wrapper, epochs):
    """What each of two ranks has come to."""
    lines = []
    with Cluster(ClusterSpec(nodes=2), loopback=True) as cluster:
        job = cluster.start(
            [sys.executable, SCRIPT, how, wrapper, str(epochs)], on_line=lines.append
        )
        result = job.wait(timeout_s=MOST_S)
    text = "\n".join(line.text for line in lines)
    assert result.exit_code == 0, text
    return [line.text for line in lines if " with " in line.text and " beside " in line.text]


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["ddp", "sharded"])
@pytest.mark.parametrize(("how", "epochs"), [("fork", 8), ("spawn", 2)])
def test_workers_that_load_data(how, epochs, wrapper):
    """Tens of seconds: workers begin anew for each epoch, and spawned ones import torch."""
    expected, found = said("here", wrapper, epochs), said(how, wrapper, epochs)
    assert len(found) == 2
    for line in found:
        assert line.startswith("settled with ")
        assert "gradweave" in line  # there was a thread of ours to be forked beside
    assert {line.partition(" beside ")[0] for line in found} == {
        line.partition(" beside ")[0] for line in expected
    }
