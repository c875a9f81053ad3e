"""All ranks of an exchange in one process, round by round, without a network."""

from dataclasses import dataclass, field

import numpy as np

from gradweave.sparse.exchange import EXCHANGES, Exchanged
from gradweave.sparse.vectors import SparseVector


@dataclass
class Traffic:
    """Vectors sent in each round by each rank that sends."""

    rounds: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def vectors_in_a_row(self):
        """What the slowest rank of each round sends, all rounds together."""
        return sum(max(sent.values()) for sent in self.rounds.values())


def exchange_all(
    name: str, vectors: list[SparseVector], k: int, traffic: Traffic | None = None
) -> list[Exchanged]:
    ranks = len(vectors)
    exchange = EXCHANGES[name]
    parts = [exchange.part(rank, vectors[rank], k) for rank in range(ranks)]
    steps = [{s.round: s for s in exchange.steps(rank, ranks)} for rank in range(ranks)]
    for number in sorted({number for own in steps for number in own}):
        present = {rank: own[number] for rank, own in enumerate(steps) if number in own}
        sent = {
            (rank, step.to): parts[rank].outgoing(step)
            for rank, step in present.items()
            if step.to is not None
        }
        if traffic is not None:
            traffic.rounds[number] = {rank: len(message) for (rank, _), message in sent.items()}
        for rank, step in present.items():
            if step.source is not None:
                message = sent.pop((step.source, rank))
                assert len(message) == step.vectors
                parts[rank].arrived(step, message)
        assert not sent, "sent, but received by nobody"
    return [part.result() for part in parts]


def sparse(elements: dict[int, float], kind=np.float32, indices=np.int32) -> SparseVector:
    ascending = sorted(elements)
    return SparseVector(
        np.array(ascending, indices), np.array([elements[i] for i in ascending], kind)
    )


def elements(vector: SparseVector) -> dict[int, float]:
    return dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))


def bits(vector: SparseVector) -> tuple[bytes, bytes, bool]:
    return vector.indices.tobytes(), vector.values.tobytes(), vector.finite


def dense(vector: SparseVector, numel: int) -> np.ndarray:
    whole = np.zeros(numel, vector.values.dtype)
    whole[vector.indices] = vector.values
    return whole
