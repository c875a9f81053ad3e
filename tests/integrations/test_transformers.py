"""Transformers' Trainer with our wrapper: the same losses, logs and checkpoints that know of it."""

from operator import attrgetter
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

import torch
from launched import MOST_STEPS, QUICK, STEPS_AFTERWARDS, on_two
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    integrations,
    set_seed,
)
from transformers.modeling_outputs import ModelOutput
from transformers.trainer_utils import HPSearchBackend

from gradweave import DistributedDataParallel
from gradweave._src.integrations.transformers import use_gradweave

SMALL_MB = 0.005
OPTIONS = {"record_steps": 1, "trial_steps": 1, "planner": "single"}


def language_model():
    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=16,
            vocab_size=50,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


class Nested(nn.Module):
    """Outputs within outputs."""

    def __init__(self):
        super().__init__()
        set_seed(0)
        self.embedding, self.head = nn.Embedding(50, 12), nn.Linear(12, 50)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return ModelOutput(loss=loss, parts=ModelOutput(logits=(logits,)))


def sentences(count):
    torch.manual_seed(7)
    tokens = torch.randint(50, (count, 8))
    return [{"input_ids": one, "labels": one} for one in tokens]


class StopAfterwards(TrainerCallback):
    """Some steps after planning has settled, with a checkpoint, at the same one on all ranks."""

    def __init__(self, *, saves=False):
        self.in_use, self.settled_for, self.saves = None, 0, saves

    def on_step_end(self, args, state, control, **kwargs):
        self.settled_for += self.in_use.findings().stage == "settled"
        if self.settled_for >= STEPS_AFTERWARDS:
            control.should_training_stop, control.should_save = True, self.saves


HABITS = {
    "plain": (language_model, {}),
    "accumulating": (language_model, {"gradient_accumulation_steps": 2}),
    "clipping": (language_model, {"max_grad_norm": 0.1}),
    "evaluating": (language_model, {"eval_strategy": "steps", "eval_steps": 9}),
    "checkpointing activations": (language_model, {"gradient_checkpointing": True}),
    "static": (
        language_model,
        {"ddp_static_graph": True, "ddp_find_unused_parameters": False},
    ),
    "nested outputs": (Nested, {}),
}


def made_trainer(model, folder, *, callbacks=(), max_steps=MOST_STEPS, **options):
    settings = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_bucket_cap_mb=SMALL_MB,
        max_steps=max_steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    return Trainer(
        **{"model" if isinstance(model, nn.Module) else "model_init": model},
        args=settings,
        train_dataset=sentences(64),
        eval_dataset=sentences(8),
        callbacks=list(callbacks),
    )


def logged(trainer, key="loss"):
    return [said[key] for said in trainer.state.log_history if key in said]


def evaluated(trainer):
    """But for its last step, after which who comes to max_steps evaluates once more."""
    return [
        (said["step"], said["eval_loss"])
        for said in trainer.state.log_history
        if "eval_loss" in said and said["step"] < trainer.state.global_step
    ]


def side_by_side(rank, habit, folder):
    make, options = HABITS[habit]
    stops = StopAfterwards()
    ours = made_trainer(make(), folder / "ours", callbacks=[stops], **options)
    stops.in_use = in_use = use_gradweave(ours, **OPTIONS)
    ours.train()
    torchs = made_trainer(make(), folder / "torchs", max_steps=ours.state.global_step, **options)
    torchs.train()
    return {
        "losses": (logged(ours), logged(torchs)),
        "evaluated": (evaluated(ours), evaluated(torchs)),
        "weights": all(
            torch.equal(a, b)
            for a, b in zip(ours.model.parameters(), torchs.model.parameters(), strict=True)
        ),
        "classes": (
            isinstance(ours.model_wrapped, DistributedDataParallel),
            type(torchs.model_wrapped) is TorchDDP,
        ),
        "found": in_use.findings(),
        "told": [said for said in ours.state.log_history if "gradweave/settled" in said],
    }


@pytest.mark.parametrize("habit", HABITS)
def test_the_same_losses_as_with_torchs_class(tmp_path, habit):
    """Seconds: whole courses of planning, and the same training again."""
    for rank in on_two(side_by_side, habit, tmp_path, scratch=tmp_path):
        ours, torchs = rank["losses"]
        assert ours == torchs
        assert STEPS_AFTERWARDS < len(ours) < MOST_STEPS
        assert rank["evaluated"][0] == rank["evaluated"][1]
        assert bool(rank["evaluated"][0]) == (habit == "evaluating")
        assert rank["weights"]
        assert rank["classes"] == (True, True)
        found = rank["found"]
        assert found.stage == "settled"
        assert found.passes == (2 if habit == "accumulating" else 1)
        (told,) = rank["told"]
        assert told["gradweave/settled"] == 1
        assert told.get("gradweave/messages") == (
            None if found.plan is None else len(found.plan.buckets)
        )


def resumed(rank, folder):
    stops = StopAfterwards(saves=True)
    first = made_trainer(
        language_model(), folder, callbacks=[stops], save_strategy="steps", save_steps=MOST_STEPS
    )
    stops.in_use = in_use = use_gradweave(first, **OPTIONS)
    first.train()
    steps = first.state.global_step
    found = []
    for is_ours in (True, False):
        trainer = made_trainer(language_model(), folder, max_steps=steps + 3)
        again = use_gradweave(trainer, **OPTIONS) if is_ours else None
        trainer.train(resume_from_checkpoint=True)
        found.append(logged(trainer)[-3:])
        if again is not None:
            remembered = again.findings().is_remembered, again.plan == in_use.plan
    return remembered, found


def test_a_checkpoint_has_the_recipe(tmp_path):
    for remembered, (ours, torchs) in on_two(resumed, tmp_path / "run", scratch=tmp_path):
        assert remembered == (True, True)
        assert ours == torchs
    (file,) = (tmp_path / "run").rglob("gradweave_recipe_0.json")
    assert file.parent.name.startswith("checkpoint-")


def trained_twice(rank, folder, makes):
    """By one trainer, which wraps a model that it is given once, and one that it makes anew."""
    model, stops = language_model if makes else language_model(), StopAfterwards()
    trainer = made_trainer(model, folder, callbacks=[stops])
    stops.in_use = in_use = use_gradweave(trainer, **OPTIONS)
    found = []
    for _ in range(2):
        trainer.train()
        told = [said for said in trainer.state.log_history if "gradweave/settled" in said]
        found.append((in_use.plan, in_use.findings().is_remembered, len(told)))
        stops.settled_for = 0
    return found, len(in_use.accounts), trainer.state.global_step


@pytest.mark.parametrize("makes", [True, False])
def test_a_second_training_begins_with_what_the_first_has_found(tmp_path, makes):
    results = on_two(trained_twice, tmp_path / "run", makes, scratch=tmp_path)
    for ((plan, remembered, told), again), wrapped, steps in results:
        assert (remembered, told) == (False, 1)
        assert again == (plan, makes, 1)
        assert wrapped == 1
        assert steps == STEPS_AFTERWARDS


def searched(rank, folder):
    """As a search for hyperparameters trains: each trial makes an accelerator of its own."""
    trainer = made_trainer(language_model, folder, max_steps=2)
    first, in_use = trainer.accelerator, use_gradweave(trainer, **QUICK)
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, None
    trainer.hp_space = integrations.hp_params = attrgetter("params")  # that library is not here
    classes = []
    for number, rate in enumerate((0.1, 0.2)):
        trainer.train(trial=SimpleNamespace(number=number, params={"learning_rate": rate}))
        assert trainer.args.learning_rate == rate
        classes.append(isinstance(trainer.model_wrapped, DistributedDataParallel))
    last = trainer.accelerator
    in_use.undo()
    left = [set(vars(one)) & {"prepare_model", "gradweave_in_use"} for one in (first, last)]
    trainer.train(trial=SimpleNamespace(number=2, params={"learning_rate": 0.3}))
    return classes, first is last, left, type(trainer.model_wrapped) is TorchDDP


def test_trials_of_a_search_have_our_wrapper(tmp_path):
    expected = [True, True], False, [set(), set()], True
    assert on_two(searched, tmp_path / "run", scratch=tmp_path) == [expected] * 2


def undone(rank, folder):
    """What was changed about a trainer, and what is left of that."""
    trainer = made_trainer(language_model(), folder, max_steps=2)
    before = set(vars(trainer)), set(vars(trainer.accelerator)), trainer.callback_handler.callbacks
    kinds = [type(callback) for callback in before[2]]
    use_gradweave(trainer, **QUICK).undo()
    trainer.train()
    after = [type(callback) for callback in trainer.callback_handler.callbacks]
    changed = {"train", "create_accelerator_and_postprocess"}
    left = set(vars(trainer.accelerator)) - before[1], changed & set(vars(trainer))
    return left, kinds == after, type(trainer.model_wrapped) is TorchDDP


def test_what_was_changed_can_be_undone(tmp_path):
    assert on_two(undone, tmp_path / "run", scratch=tmp_path) == [((set(), set()), True, True)] * 2
