"""Lightning's Trainer and Fabric with our wrapper: the same losses, and what was found."""

import logging

import pytest

pytest.importorskip("lightning")

import torch
from launched import MOST_STEPS, QUICK, STEPS_AFTERWARDS, TORCHS, inputs_of, network, on_two
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning_training import (
    Frozen,
    Gan,
    Manual,
    Small,
    StopAfterwards,
    Wide,
    data_of,
    fitted,
    made_trainer,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel, RequestError
from gradweave._src import files
from gradweave._src.integrations.lightning import GradweaveFabricStrategy, GradweaveStrategy
from gradweave._src.recipe import Recipe


def stops_early():
    """After the seventh epoch: losses do not grow, as they should for it."""
    return EarlyStopping("loss", mode="max", patience=6, check_on_train_epoch_end=True)


HABITS = {
    "automatic": (Small, {}, {}),
    "accumulating": (Small, {}, {"accumulate_grad_batches": 3}),
    "clipping": (Small, {}, {"gradient_clip_val": 0.05}),
    "validating": (Small, {}, {"validates": True, "val_check_interval": 7}),
    "stopping early": (Small, {}, {"callbacks": [stops_early]}),
    "manual": (Manual, {}, {}),
    "manual, static": (Manual, {"static_graph": True}, {}),
    "gan": (Gan, {"find_unused_parameters": True}, {}),
    "unused": (Frozen, {"find_unused_parameters": True}, {}),
    "half the bits": (Small, {}, {"precision": "bf16-mixed"}),
}


def side_by_side(rank, habit):
    kind, of_wrapper, of_trainer = HABITS[habit]
    ours, strategy = kind(), GradweaveStrategy(**QUICK, **of_wrapper)
    trainer = fitted(strategy, ours, rank, **({"callbacks": [StopAfterwards]} | of_trainer))
    torchs = kind()
    limit = {} if "callbacks" in of_trainer else {"max_steps": trainer.global_step}
    fitted(DDPStrategy(**TORCHS, **of_wrapper), torchs, rank, **(of_trainer | limit))
    return ours.losses, torchs.losses, strategy.findings().stage, trainer.state.finished


@pytest.mark.parametrize("habit", HABITS)
def test_the_same_losses_as_with_torchs_class(tmp_path, habit):
    """Seconds: whole courses of planning, and the same training again."""
    for ours, torchs, stage, is_finished in on_two(side_by_side, habit, scratch=tmp_path):
        assert len(torchs) > STEPS_AFTERWARDS
        # Ours may have ended in the middle of an accumulation.
        assert 0 <= len(ours) - len(torchs) < 3
        assert ours[: len(torchs)] == torchs
        assert stage == "settled"
        assert is_finished


class WithOurClass(DDPStrategy):
    """Lightning's own, as `gradweave run` has it: it sends a static graph's first pass once."""

    def _setup_model(self, model):
        self.wrapper = DistributedDataParallel(model, **self._ddp_kwargs)
        self.account = self.wrapper.account()
        return self.wrapper


def without_our_strategy(rank):
    strategy, ours, torchs = WithOurClass(**QUICK, static_graph=True), Manual(), Manual()
    fitted(strategy, ours, rank, max_steps=40)
    fitted(DDPStrategy(**TORCHS, static_graph=True), torchs, rank, max_steps=40)
    return ours.losses, torchs.losses, strategy.account.explain()


def test_a_static_graph_keeps_its_buckets_where_nobody_sends_its_first_pass_again(tmp_path):
    for ours, torchs, explained in on_two(without_our_strategy, scratch=tmp_path):
        assert ours == torchs
        assert "backward runs inside of forward" in explained


def by_name(rank):
    module = Small()
    trainer = fitted("gradweave", module, rank, max_steps=3)
    unused = made_trainer("gradweave_find_unused_parameters_true").strategy
    return type(trainer.strategy).__name__, len(module.losses), unused._ddp_kwargs


def test_it_has_a_name(tmp_path):
    for kind, steps, options in on_two(by_name, scratch=tmp_path):
        assert (kind, steps) == ("GradweaveStrategy", 3)
        assert options == {"find_unused_parameters": True}


class Remembers(Logger):
    """What a logger is told, on every rank; it has no experiment."""

    def __init__(self):
        super().__init__()
        self.told = []

    name, version = "remembers", 0

    def log_metrics(self, metrics, step=None):
        self.told.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


class TakesTexts(Remembers):
    """As TensorBoard's."""

    def __init__(self):
        super().__init__()
        self.texts = []

    @property
    def experiment(self):
        return self

    def add_text(self, tag, text, step):
        self.texts.append((tag, text, step))


def told(rank, folder):
    strategy, logger, texts = GradweaveStrategy(**QUICK), Remembers(), TakesTexts()
    loggers = [logger, texts, CSVLogger(folder)]
    trainer = fitted(strategy, Small(), rank, logger=loggers, callbacks=[StopAfterwards])
    ((tag, text, _),) = texts.texts
    assert (tag, text) == ("gradweave", strategy.explain())
    trainer.validate(Small(), data_of(rank), verbose=False)
    ours = [(step, said) for step, said in logger.told if "gradweave/settled" in said]
    return ours, len(strategy.plan.buckets), strategy.findings().gain, trainer.global_step


def test_loggers_are_told_once_when_it_is_settled(tmp_path):
    results = on_two(told, tmp_path / "logs", scratch=tmp_path)
    for ((step, said),), messages, gain, steps in results:
        assert 0 < step <= steps
        assert said["gradweave/settled"] == 1
        assert said["gradweave/messages"] == messages
        assert said["gradweave/gain"] == gain
        assert said["gradweave/planning_steps"] > 0
    (written,) = (tmp_path / "logs").rglob("metrics.csv")
    assert "gradweave/gain" in written.read_text()


def outliving(rank):
    strategy = GradweaveStrategy(**QUICK)
    with pytest.raises(RequestError, match="no model was wrapped yet"):
        strategy.explain()
    trainer = fitted(strategy, Small(), rank, callbacks=[StopAfterwards])
    first = strategy.plan, strategy.explain(), strategy.recipe()
    is_unwrapped = not isinstance(trainer.model, TorchDDP)
    again = Small()
    trainer.fit(again, data_of(rank))  # until the callback sees that it is settled
    return is_unwrapped, first, strategy.findings().is_remembered, strategy.plan, again.losses


def test_what_was_found_outlives_the_training_and_a_second_fit_begins_with_it(tmp_path):
    for unwrapped, (plan, explained, recipe), remembered, again, losses in on_two(
        outliving, scratch=tmp_path
    ):
        assert unwrapped
        assert "Measured: 6 gradients" in explained
        assert recipe.plan == plan == again
        assert remembered
        assert len(losses) == 1


def resumed(rank, folder):
    kept = ModelCheckpoint(folder, filename="kept", save_last=True)
    strategy = GradweaveStrategy(**QUICK)
    first = fitted(
        strategy,
        Small(),
        rank,
        callbacks=[StopAfterwards, lambda: kept],
        enable_checkpointing=True,
    )
    again, module, stages = GradweaveStrategy(**QUICK), Small(), []
    notes = LambdaCallback(on_train_start=lambda *_: stages.append(again.findings().stage))
    trainer = made_trainer(again, max_steps=first.global_step + 4, max_epochs=-1, callbacks=[notes])
    trainer.fit(module, data_of(rank), ckpt_path=str(folder / "last.ckpt"))
    # With torch's class: what is in the file of ours bothers nobody.
    torchs = Small()
    plain = made_trainer(DDPStrategy(), max_steps=first.global_step + 4, max_epochs=-1)
    plain.fit(torchs, data_of(rank), ckpt_path=str(folder / "last.ckpt"))
    return (
        strategy.recipe(),
        again.recipe(),
        again.findings().is_remembered and stages == ["settled"],
        module.losses,
        torchs.losses,
    )


def test_a_checkpoint_has_the_recipe(tmp_path):
    results = on_two(resumed, tmp_path / "kept", scratch=tmp_path)
    for first, again, remembered, losses, torchs in results:
        assert first.plan == again.plan
        assert remembered
        assert losses == torchs
        assert len(losses) == 4
    text = torch.load(tmp_path / "kept" / "last.ckpt", weights_only=True)["gradweave_recipes"][0]
    assert files.loads(text, Recipe, origin="checkpoint") == results[0][0]


def refitted(rank):
    """Another model with the strategy of the first."""
    strategy = GradweaveStrategy(**QUICK)
    trainer = fitted(strategy, Small(), rank, callbacks=[StopAfterwards])
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("gradweave").addHandler(handler)
    trainer.limit_train_batches = 4
    trainer.fit_loop.max_epochs = trainer.current_epoch + 1
    trainer.fit(Wide(), data_of(rank))
    return strategy.findings().is_remembered, [line for line in lines if "recipe" in line]


def test_another_model_is_planned_anew(tmp_path):
    first, second = on_two(refitted, scratch=tmp_path)
    assert (first[0], second[0]) == (False, False)
    assert len(first[1]) == 1
    assert first[1][0].startswith("leaving a recipe alone: ")
    assert second[1] == []


def with_options(rank, folder):
    strategy = GradweaveStrategy(precision="bf16", cache=folder, timeline=True)
    seen = []

    class Looks(StopAfterwards):
        def on_train_batch_end(self, trainer, *args):
            seen.append(trainer.model)
            trainer.should_stop = len(seen) > 2

    fitted(strategy, Small(), rank, callbacks=[Looks])
    wrapper = seen[0]
    return type(wrapper) is DistributedDataParallel, wrapper._options.precision, wrapper.timeline()


def test_options_of_the_wrapper_are_passed_on(tmp_path):
    for is_ours, precision, timeline in on_two(with_options, tmp_path / "c", scratch=tmp_path):
        assert (is_ours, precision) == (True, "bf16")
        assert timeline.spans


def with_fabric(rank, folder):
    """Two models, kept and set up again."""
    ours = fabric_steps(rank, GradweaveFabricStrategy(**QUICK), MOST_STEPS, folder)
    steps = len(ours["losses"]) // 2
    torchs = fabric_steps(rank, "ddp", steps, None)
    again = fabric_steps(rank, GradweaveFabricStrategy(**QUICK), 2, None, resumed_from=folder)
    return ours, torchs, again


def fabric_steps(rank, strategy, most, folder, *, resumed_from=None):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    state = {}
    for name in ("first", "second"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        state[name], state[f"optimizer of {name}"] = fabric.setup(model, optimizer)
    if resumed_from is not None:
        left = fabric.load(resumed_from / "state.ckpt", state)
        assert not left
    losses, settled_for = [], 0
    while len(losses) < 2 * most and settled_for < STEPS_AFTERWARDS:
        for name in ("first", "second"):
            for micro in range(2):
                with fabric.no_backward_sync(state[name], enabled=micro == 0):
                    value = inputs_of(1000 * len(losses) + 10 * micro + rank, 4)
                    loss = state[name](value).square().mean()
                    fabric.backward(loss)
            fabric.clip_gradients(state[name], state[f"optimizer of {name}"], max_norm=0.5)
            state[f"optimizer of {name}"].step()
            state[f"optimizer of {name}"].zero_grad()
            losses.append(loss.item())
        if folder is not None or resumed_from is not None:
            stages = {one.findings().stage for one in fabric.strategy.accounts}
            settled_for += stages == {"settled"}
    if folder is not None:
        fabric.save(folder / "state.ckpt", state)
    found = {"losses": losses}
    if fabric.strategy.__class__ is GradweaveFabricStrategy:
        accounts = fabric.strategy.accounts
        found["plans"] = [account.plan for account in accounts]
        found["remembered"] = [account.findings().is_remembered for account in accounts]
    return found


def test_fabric(tmp_path):
    for ours, torchs, again in on_two(with_fabric, tmp_path / "kept", scratch=tmp_path):
        assert ours["losses"] == torchs["losses"]
        assert ours["remembered"] == [False, False]
        assert again["remembered"] == [True, True]
        assert again["plans"] == ours["plans"]


def fabric_by_name(rank):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="gradweave")
    fabric.launch()
    model = fabric.setup_module(network())
    rounded = GradweaveFabricStrategy(precision="bf16")
    return isinstance(model.module, torch.nn.Module), type(fabric.strategy), rounded._ddp_kwargs


def test_fabric_knows_its_name(tmp_path):
    for _, kind, options in on_two(fabric_by_name, scratch=tmp_path):
        assert kind is GradweaveFabricStrategy
        assert options == {"precision": "bf16"}
