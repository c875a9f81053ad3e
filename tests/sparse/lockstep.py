"""All ranks of an exchange in one process, round by round, without a network."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from gradweave._src.collectives.program import Kind, program
from gradweave._src.sparse.exchange import EXCHANGES, Exchanged
from gradweave._src.sparse.vectors import SparseVector


@dataclass
class Traffic:
    """Vectors sent in each round by each rank that sends."""

    rounds: dict[int, Counter[int]] = field(default_factory=dict)

    def add(self, number, sent):
        vectors = self.rounds[number] = Counter()
        for (rank, *_), message in sent.items():
            vectors[rank] += len(message)

    @property
    def vectors_in_a_row(self):
        """What the slowest rank of each round sends, all rounds together."""
        return sum(max(sent.values()) for sent in self.rounds.values())


def exchange_all(
    name: str, vectors: list[SparseVector], k: int, traffic: Traffic | None = None
) -> list[Exchanged]:
    exchange, ranks = EXCHANGES[name], range(len(vectors))
    schedule = exchange.schedule(len(ranks))
    steps = [program(schedule, rank).steps for rank in ranks]
    participants = [exchange.participant(rank, vectors[rank], k) for rank in ranks]
    for number in range(schedule.rounds):
        present = [(rank, step) for rank in ranks for step in steps[rank] if step.round == number]
        sent = {
            (rank, step.peer, step.ordinal): participants[rank].outgoing(step)
            for rank, step in present
            if step.kind is Kind.SEND
        }
        if traffic is not None:
            traffic.add(number, sent)
        for rank, step in present:
            if step.kind is not Kind.SEND:
                message = sent.pop((step.peer, rank, step.ordinal))
                assert len(message) == step.last - step.first
                participants[rank].arrived(step, message)
        assert not sent, "sent, but received by nobody"
    return [participant.result() for participant in participants]


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
