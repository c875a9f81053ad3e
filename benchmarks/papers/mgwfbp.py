"""MG-WFBP: the INFOCOM 2019 and the journal 2020 paper."""

from . import (
    mgwfbp_bands,
    mgwfbp_clusters,
    mgwfbp_fits,
    mgwfbp_messages,
    mgwfbp_nodes,
    mgwfbp_passes,
    mgwfbp_ring,
    mgwfbp_servers,
    mgwfbp_tensor_sizes,
    mgwfbp_trees,
)
from .page import Chapter

INTRODUCTION = """
    Gradients are sent while backward still runs, and merging some of them saves start-ups; the
    question is which. Compared are `wfbp` (each gradient alone), `single` (all in one message after
    backward; the paper's SyncEASGD), `mgwfbp` (the paper's Algorithm 1) and `optimal` (our exact
    planner). Scaling is simulated on `k80-10gbe`, the network of the authors' published simulator.
"""


def chapter() -> Chapter:
    return Chapter(
        title="MG-WFBP: merging gradients",
        introduction=INTRODUCTION,
        sections=[
            mgwfbp_fits.section(),
            mgwfbp_ring.section(),
            mgwfbp_bands.section(),
            mgwfbp_messages.section(),
            mgwfbp_trees.section(),
            mgwfbp_nodes.section(),
            mgwfbp_servers.section(),
            mgwfbp_clusters.section(),
            mgwfbp_tensor_sizes.section(),
            mgwfbp_passes.section(),
        ],
    )
