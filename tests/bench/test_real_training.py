from ranks import on_processes

from gradweave._src.bench.real_training import RealQuestion
from gradweave._src.bench.real_training_job import answers


def answered(group, question):
    found = list(answers(question, group))
    *series, turns = found
    return [(one.series.label, one.correct, one.series.losses) for one in series], turns.turns_s


def test_runtimes_train_alike_and_then_take_turns(tmp_path):
    question = RealQuestion(
        runtimes=("torch-ddp", "bsp-allreduce:native", "gradweave"),
        model="small-cnn",
        least_steps=3,
        batch_size=2,
        learning_rate=0.01,
        is_double=True,
        turns=2,
    )
    for trained, turns_s in on_processes(2, answered, question, scratch=tmp_path):
        assert [label for label, *_ in trained] == ["gradweave", *question.runtimes[:2]]
        assert all(correct for _, correct, _ in trained)
        (_, _, first), *others = trained
        for _, _, losses in others:
            assert len(losses) == len(first)
            assert max(abs(a - b) for a, b in zip(losses, first, strict=True)) < 1e-9
        assert {runtime: len(steps_s) for runtime, steps_s in turns_s.items()} == dict.fromkeys(
            question.runtimes, 2
        )
