from ranks import on_processes, on_threads

from gradweave._src.bench.real_training import STEPS_OF_A_TURN, RealQuestion
from gradweave._src.bench.real_training_job import WARMUP_STEPS, Trained, answers, in_turns


class NoData:
    def loss(self, step):
        return lambda _: step


def noted_turns(group):
    log = []
    trainings = {
        name: Trained(lambda _, name=name: log.append(name), model=None) for name in ("a", "b", "c")
    }
    found = in_turns(trainings, group, data=NoData(), turns=4)
    steps = WARMUP_STEPS + STEPS_OF_A_TURN
    assert all(len(set(log[first : first + steps])) == 1 for first in range(0, len(log), steps))
    return "".join(log[::steps]), {name: len(turns_s) for name, turns_s in found.items()}


def test_the_order_of_turns_changes():
    assert on_threads(2, noted_turns) == [("abcbcacababc", {"a": 4, "b": 4, "c": 4})] * 2


def answered(group, question):
    *series, turns = answers(question, group)
    return [(one.series.label, one.correct, one.series.losses) for one in series], turns.turns_s


def test_runtimes_train_alike_and_then_take_turns(tmp_path):
    """Seconds: one of them plans."""
    question = RealQuestion(
        runtimes=("torch-ddp", "bsp-allreduce:native", "gradweave"),
        model="small-cnn",
        least_steps=3,
        batch_size=2,
        learning_rate=0.01,
        is_double=True,
        turns=1,
    )
    for trained, turns_s in on_processes(2, answered, question, scratch=tmp_path):
        assert [label for label, *_ in trained] == ["gradweave", *question.runtimes[:2]]
        assert all(correct for _, correct, _ in trained)
        (_, _, first), *others = trained
        for _, _, losses in others:
            assert len(losses) == len(first)
            assert max(abs(a - b) for a, b in zip(losses, first, strict=True)) < 1e-9
        assert turns_s.keys() == set(question.runtimes)
