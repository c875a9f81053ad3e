"""What scripts do around their steps: optimizers, checkpoints, copies, collectives, data."""

import copy
import io
import threading

import torch
import torch.distributed as dist
from habits_of_models import Convolutional, batch, network, sgd, take_step, train
from habits_of_one_rank import Fails, metric_of
from side_by_side import STAGES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset


def averages_weights(wrap, rank):
    """A moving average beside the training, made from a copy."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    averaged = torch.optim.swa_utils.AveragedModel(wrapped.module)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        averaged.update_parameters(wrapped.module)
    averaged(batch(0, rank)).sum().backward()
    return {"model": wrapped, "averaged": averaged}


def averages_a_copy_of_the_wrapper(wrap, rank):
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    averaged = None
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if wrap.begins("recording") or wrap.begins("trying"):
            averaged = torch.optim.swa_utils.AveragedModel(wrapped)
        if averaged is not None:
            averaged.update_parameters(wrapped)
    return {"model": wrapped, "averaged": averaged.module}


def loads_a_state(wrap, rank):
    """Goes back to an earlier state now and then."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    kept = copy.deepcopy([wrapped.state_dict(), optimizer.state_dict()])
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if step % 20 == 4:
            kept = copy.deepcopy([wrapped.state_dict(), optimizer.state_dict()])
        if step % 20 == 14:
            wrapped.load_state_dict(kept[0])
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
    return {"model": wrapped}


def in_every_stage(wrap):
    return any(wrap.begins(stage) for stage in STAGES)


def copies_its_model(wrap, rank):
    """And trains the copy for a step, without the wrapper and with one of its own."""
    wrapped = wrap(network())
    optimizer, copies = sgd(wrapped), []
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if in_every_stage(wrap):
            copied, rewrapped = copy.deepcopy(wrapped.module), copy.deepcopy(wrapped)
            for each in (copied, rewrapped):
                take_step(each, sgd(each), batch(step, rank))
            copies += [copied, rewrapped.module]
    return {"model": wrapped, "copies": copies}


def pickles_its_model(wrap, rank):
    """Both the model and the wrapper; what comes back trains."""
    wrapped = wrap(network())
    optimizer, copies = sgd(wrapped), []
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if in_every_stage(wrap):
            for each in (wrapped.module, wrapped):
                file = io.BytesIO()
                torch.save(each, file)
                file.seek(0)
                loaded = torch.load(file, weights_only=False)
                take_step(loaded, sgd(loaded), batch(step, rank))
                copies.append(dict(loaded.state_dict()))
    return {"model": wrapped, "copies": copies}


def exports_its_model(wrap, rank):
    """A copy is scripted, and the model itself is traced."""
    wrapped = wrap(network())
    optimizer, outputs = sgd(wrapped), []
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if in_every_stage(wrap):
            scripted = torch.jit.script(copy.deepcopy(wrapped.module))
            traced = torch.jit.trace(wrapped.module, batch(0, 0))
            symbolic = torch.fx.symbolic_trace(wrapped.module)
            outputs += [each(batch(1, 0)) for each in (scripted, traced, symbolic)]
    return {"model": wrapped, "outputs": outputs}


def optimizer_before_wrapping(wrap, rank):
    model = network()
    optimizer = sgd(model)
    return train(wrap, rank, wrap(model), optimizer)


def fused_optimizer(wrap, rank):
    wrapped = wrap(network(), gradient_as_bucket_view=True)
    return train(wrap, rank, wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True))


def sharded_optimizer(wrap, rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 warns

    wrapped = wrap(network())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-3)
    return train(wrap, rank, wrapped, optimizer)


def batched_copies_of_gradients(wrap, rank):
    return train(wrap, rank, wrap(network(), batched_grad_copy=True))


def other_first_bucket(wrap, rank):
    """torch reads the size of its first bucket when it makes buckets of its usual size."""
    before = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = 200
    try:
        return train(wrap, rank, wrap(network(12, 5), bucket_cap_mb=None))
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = before


def communication_hook(wrap, rank):
    wrapped = wrap(network())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(wrap, rank, wrapped)


def communication_hook_in_cpp(wrap, rank):
    wrapped = wrap(network())
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return train(wrap, rank, wrapped)


def other_group(wrap, rank, *, stage="trying"):
    """Of as many ranks, as after one that was lost has come again."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        if wrap.begins(stage):
            wrapped._update_process_group(dist.new_group())
        take_step(wrapped, optimizer, batch(step, rank))
    return {"model": wrapped}


def communication_hook_later(wrap, rank, *, stage="recording"):
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        if wrap.begins(stage):
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        take_step(wrapped, optimizer, batch(step, rank))
    return {"model": wrapped}


def communication_hook_while_plans_are_tried(wrap, rank):
    return communication_hook_later(wrap, rank, stage="trying")


def uneven_inputs(wrap, rank, *, stage="recording"):
    """Ranks join when they have run out of data."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if wrap.begins(stage):
            with wrapped.join():
                for number in range(3 + 4 * rank):
                    take_step(wrapped, optimizer, batch(number, rank))
    return {"model": wrapped}


def uneven_inputs_while_plans_are_tried(wrap, rank):
    return uneven_inputs(wrap, rank, stage="trying")


def collectives_of_its_own(wrap, rank):
    """In hooks inside backward, in flight during forward, before and after each step."""
    wrapped = wrap(network())
    optimizer, sums = sgd(wrapped), set()

    def in_backward(*_):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        sums.add(ones.sum().item())

    wrapped.module[2].register_full_backward_hook(in_backward)
    for step in wrap.steps():
        optimizer.zero_grad()
        ones = torch.ones(5)
        in_flight = dist.all_reduce(ones, async_op=True)
        loss = wrapped(batch(step, rank)).square().mean()
        sums.add(metric_of(rank))
        if step % 7 == 0:
            ranks = [None, None]
            dist.all_gather_object(ranks, {"rank": rank})
            sums.add(float(ranks[1]["rank"]))
        if step % 5 == 0:
            dist.barrier()
        loss.backward()
        in_flight.wait()
        sums.add(ones.sum().item())
        optimizer.step()
    return {"model": wrapped, "sums": sorted(sums)}


def groups_of_its_own(wrap, rank):
    """Made, used and destroyed all the time; torch counts groups, the same on all ranks."""
    wrapped = wrap(network())
    optimizer, sums = sgd(wrapped), set()
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if step % 8 == 3:
            group = dist.new_group()
            ones = torch.ones(2)
            dist.all_reduce(ones, group=group)
            sums.add(ones.sum().item())
            dist.destroy_process_group(group)
    return {"model": wrapped, "sums": sorted(sums)}


def group_of_the_wrapper(wrap, rank):
    return train(wrap, rank, wrap(network(), process_group=dist.new_group()))


def keys_in_the_store(wrap, rank):
    """The script meets in the store that all groups share."""
    wrapped = wrap(network())
    optimizer, store = sgd(wrapped), dist.distributed_c10d._get_default_store()
    store, counts = dist.PrefixStore(f"with {type(wrapped).__module__}", store), set()
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if step % 10 == 0:
            store.set(f"{step} by {rank}", str(rank))
            counts.add(store.get(f"{step} by {1 - rank}").decode())
    return {"model": wrapped, "counts": sorted(counts)}


def data_from_forked_workers(wrap, rank):
    """Each epoch forks a process, whatever threads there are."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    data = TensorDataset(batch(0, rank, (8, 6)))
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if in_every_stage(wrap):
            for (part,) in DataLoader(
                data, batch_size=4, num_workers=1, multiprocessing_context="fork"
            ):
                take_step(wrapped, optimizer, part)
    return {"model": wrapped}


def trains_in_a_thread(wrap, rank):
    """As Ray and notebooks run training functions."""
    came_out = {}
    thread = threading.Thread(target=lambda: came_out.update(train(wrap, rank, wrap(network()))))
    thread.start()
    thread.join()
    return came_out


def clips_weights_and_gradients(wrap, rank):
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        wrapped(batch(step, rank)).square().mean().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.clamp_(-0.4, 0.4)
        if step % 25 == 20:
            torch.manual_seed(step)
            wrapped.module[2].reset_parameters()
    return {"model": wrapped}


def skips_batches_that_fail(wrap, rank):
    """The same on all ranks; an interrupted one is a failure too."""
    wrapped = wrap(Fails())
    optimizer, caught = sgd(wrapped), []
    for step in wrap.steps():
        if step % 9 == 4:
            wrapped.module.failure = KeyboardInterrupt() if step % 2 else ValueError("bad batch")
        try:
            take_step(wrapped, optimizer, batch(step, rank))
        except (ValueError, KeyboardInterrupt) as failure:
            caught.append(type(failure).__name__)
    return {"model": wrapped, "caught": caught}


def reads_what_torch_logs(wrap, rank):
    """As Lightning does when a training ends."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        logged = wrapped._get_ddp_logging_data()
    names = ("module_name", "world_size", "find_unused_parameters", "broadcast_buffers")
    return {"model": wrapped, "logged": [str(logged.get(name)) for name in names]}


def hooks_on_the_wrapper(wrap, rank):
    wrapped, seen = wrap(network()), []
    wrapped.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs)))
    wrapped.register_forward_hook(lambda _, inputs, output: output * 1.01)
    came_out = train(wrap, rank, wrapped)
    return came_out | {"seen": len(seen)}


def trains_and_evaluates_by_turns(wrap, rank):
    """On all ranks alike, with buffers, in evaluation mode."""
    wrapped = wrap(Convolutional())
    optimizer, images = sgd(wrapped), (4, 2, 6, 6)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank, images))
        if step % 6 == 5:
            wrapped.eval()
            with torch.inference_mode():
                wrapped(batch(step, rank, images))
            wrapped.train()
    return {"model": wrapped}


HABITS = [
    averages_weights,
    averages_a_copy_of_the_wrapper,
    loads_a_state,
    copies_its_model,
    pickles_its_model,
    exports_its_model,
    optimizer_before_wrapping,
    fused_optimizer,
    sharded_optimizer,
    batched_copies_of_gradients,
    other_first_bucket,
    communication_hook,
    communication_hook_in_cpp,
    other_group,
    communication_hook_later,
    communication_hook_while_plans_are_tried,
    uneven_inputs,
    uneven_inputs_while_plans_are_tried,
    collectives_of_its_own,
    groups_of_its_own,
    group_of_the_wrapper,
    keys_in_the_store,
    data_from_forked_workers,
    trains_in_a_thread,
    clips_weights_and_gradients,
    skips_batches_that_fail,
    reads_what_torch_logs,
    hooks_on_the_wrapper,
    trains_and_evaluates_by_turns,
]
