"""gTop-k: exchanging the world's k largest gradients."""

from . import (
    gtopk_convergence,
    gtopk_efficiency,
    gtopk_exchange,
    gtopk_measured,
    gtopk_throughput,
)
from .gtopk_exchange import DENSITY, cluster
from .page import Chapter


def introduction() -> str:
    links = cluster().links
    assert links is not None, "gtopk-1gbe is given by its links"
    link = links.levels[0].link
    return f"""
        Instead of all gradients, top-k sends each worker's largest to everybody, and gTop-k keeps
        only the largest of all on the way up a tree. Our numbers are the closed forms of the
        paper's Table I with the latency and the time per byte of its Fig. 8
        ({link.latency_s * 1e3:g} ms, {link.s_per_byte * 1e9:g} ns), as its Fig. 9 is; k is
        {DENSITY:g} of the gradients, and each value travels with an index as long as itself. Dense
        is the ring. **No factor is fitted to the paper's measurements.**
    """


def chapter() -> Chapter:
    return Chapter(
        title="gTop-k: sparse exchange on 1 GbE",
        introduction=introduction(),
        sections=[
            gtopk_exchange.section(),
            gtopk_efficiency.section(),
            gtopk_throughput.section(),
            gtopk_measured.section(),
            gtopk_convergence.section(),
        ],
    )
