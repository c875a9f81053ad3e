"""The one home for torch's private names: what each is for, and what happens where it is gone.

Everything else in this package uses what torch documents. `tests/test_architecture.py` looks for
private names elsewhere. ``missing`` says which of them this version of torch lacks; whoever needs
one asks it when a model is wrapped, and says so in one line instead of failing somewhere inside.
"""

import inspect
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from operator import attrgetter
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.autograd import profiler
from torch.autograd.variable import Variable
from torch.distributed import HashStore, Logger, Reducer, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradweave._src.errors import RequestError

# How long to wait until the backend's threads let go of a message's tensors.
TENSORS_LET_GO_WITHIN_S = 1.0

# Names that a feature cannot do without, as paths from the module `torch`.
FOR_OTHER_BUCKETS = (
    "distributed.Reducer.get_backward_stats",
    "distributed.Reducer._push_all_rebuilt_params",
    "distributed.Reducer._rebuild_buckets",
    "distributed.Reducer._set_static_graph",
    "distributed.Reducer._update_process_group",
    "distributed.Logger._set_static_graph",
    "distributed.Logger.set_construction_data_and_log",
    "nn.parallel.DistributedDataParallel._active_ddp_module",
    "nn.parallel.DistributedDataParallel._check_reducer_finalized",
    # Those that ours overrides: under another name torch would never call ours, and nobody knew.
    "nn.parallel.DistributedDataParallel._post_forward",
    "nn.parallel.DistributedDataParallel._register_builtin_comm_hook",
    "nn.parallel.DistributedDataParallel._update_process_group",
)
FOR_BACKWARD_CALLBACKS = (
    "autograd.Variable._execution_engine.queue_callback",
    "_C._current_graph_task_id",
)

# Options of reducers that other buckets cannot do without, and those that a version may not have:
# these are given what the wrapper was given.
NEEDED_OF_REDUCERS = (
    "expect_sparse_gradients",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "param_to_name_mapping",
    "bucket_bytes_cap_list",
)
PASSED_TO_REDUCERS = (
    "skip_all_reduce_unused_params",
    "batched_grad_copy",  # from 2.12 on
    "lazy_bucket_allocation",  # from 2.15 on
)
# Options of torch's wrapper that other buckets follow, or that have nothing to do with buckets.
FOLLOWED = {
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "forward_sync_buffers",
    "init_sync",
    "process_group",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    *PASSED_TO_REDUCERS,
}

HOST = torch.device("cpu")


def missing(names: Iterable[str]) -> str | None:
    """Say in words which of these names this torch lacks; None where it has them all."""
    for name in names:
        try:
            attrgetter(name)(torch)
        except AttributeError:
            return f"torch {torch.__version__} has no torch.{name}, which this needs"
    return None


def require(names: Iterable[str]) -> None:
    """Raise RequestError unless this torch has all of these names."""
    if (lack := missing(names)) is not None:
        raise RequestError(f"{lack}; use a version of torch that gradweave supports")


# --- The reducer of torch's wrapper -------------------------------------------------------------


def why_no_other_buckets(signature: str | None = None) -> str | None:
    """Say in words what this torch lacks for other buckets; None where it has everything.

    ``signature`` is that of reducers, which are compiled: only their documentation has it.
    """
    known = reducer_options(signature)
    for name in NEEDED_OF_REDUCERS:
        if name not in known:
            return f"torch {torch.__version__} has reducers without {name}, which this needs"
    return missing(FOR_OTHER_BUCKETS)


def reducer_options(signature: str | None = None) -> set[str]:
    """Return the names of what reducers of this torch, or of such a signature, can be given."""
    if signature is None:
        signature = Reducer.__init__.__doc__ or ""
    return set(re.findall(r"(\w+): ", signature))


def unfollowed_options(given: Mapping[str, object]) -> list[str]:
    """Return those of the wrapper's options that mean something other buckets know nothing of.

    They are of a later version of torch; whoever gives its default gives nothing.
    """
    defaults = inspect.signature(TorchDDP.__init__).parameters
    return [
        name
        for name, value in given.items()
        if name not in FOLLOWED and (name not in defaults or value != defaults[name].default)
    ]


def replace_reducer(
    ddp: TorchDDP, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Sequence[str]]
) -> None:
    """Give a live wrapper exactly these buckets, by parameters' names, from its next pass on.

    The wrapper keeps its hooks, submodules and flags, which running its constructor again would
    drop; only communication hooks belong to a reducer, and must be registered again.

    torch makes other buckets after a reducer's first pass, from the order in which gradients came,
    and broadcasts them over the user's group inside of forward: ranks that evaluate by themselves
    would meet that with something else. So that happens here instead, in a group of this rank
    alone and with the plan's order and sizes, and never again.
    """
    sizes = [sum(parameters[name].nbytes for name in bucket) for bucket in buckets]
    renew_reducer(ddp, parameters, buckets, caps_bytes=sizes)
    if not keeps_declared_order(ddp):
        device = parameters[buckets[0][0]].device
        _rebuild_alone(ddp.reducer, ddp.process_group, device)
    ddp._has_rebuilt_buckets = True  # noqa: SLF001


def renew_reducer(
    ddp: TorchDDP,
    parameters: Mapping[str, nn.Parameter],
    buckets: Sequence[Sequence[str]],
    *,
    caps_bytes: Sequence[int],
) -> None:
    """Give a live wrapper such a reducer as its constructor makes, with these as its first buckets.

    After its first pass torch makes others of these caps, in the order in which gradients came,
    unless it keeps those that were declared; so all ranks call this at the same point.
    Communication hooks must be registered again.
    """
    names = [name for bucket in buckets for name in bucket]
    place = {name: number for number, name in enumerate(names)}
    # The logger has the reducer, too, and there should not be two sets of buckets.
    del ddp.reducer, ddp.logger
    in_order: list[torch.Tensor] = [parameters[name] for name in names]
    with all_requiring_grad(in_order):
        reducer = Reducer(
            in_order,
            [[place[name] for name in bucket] for bucket in buckets],
            [sum(parameters[name].nbytes for name in bucket) for bucket in buckets],
            ddp.process_group,
            expect_sparse_gradients=[False] * len(names),
            find_unused_parameters=ddp.find_unused_parameters,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            param_to_name_mapping=dict(enumerate(names)),
            bucket_bytes_cap_list=list(caps_bytes),
            **passed_on(ddp),
        )
    _give_reducer(ddp, reducer)
    ddp._has_rebuilt_buckets = False  # noqa: SLF001


def _rebuild_alone(reducer: Reducer, group: dist.ProcessGroup, device: torch.device) -> None:
    alone = _group_of_one(device)
    reducer._update_process_group(alone)  # noqa: SLF001
    reducer._push_all_rebuilt_params()  # noqa: SLF001
    is_rebuilt = reducer._rebuild_buckets()  # noqa: SLF001
    assert is_rebuilt
    reducer._update_process_group(group)  # noqa: SLF001


def _group_of_one(device: torch.device) -> dist.ProcessGroup:
    """Return a group with this rank alone.

    It is one of gloo's or, where gloo does not support the device, a fake one that sends nothing.
    """
    if device.type in dist.Backend.backend_capability["gloo"]:
        return unlisted_gloo_group(HashStore(), rank=0, ranks=1, timeout=None, device=device)
    alone = dist.ProcessGroup(HashStore(), 0, 1)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    nothing = FakeProcessGroup._create_internal(0, 1)  # noqa: SLF001
    alone._set_default_backend(kind)  # noqa: SLF001
    alone._register_backend(device, kind, nothing)  # noqa: SLF001
    return alone


def passed_on(ddp: object, signature: str | None = None) -> dict[str, Any]:
    """Return the wrapper's values of those reducer options that not every torch has."""
    known = reducer_options(signature)
    return {name: getattr(ddp, name) for name in PASSED_TO_REDUCERS if name in known}


def _give_reducer(ddp: TorchDDP, reducer: Reducer) -> None:
    ddp.reducer = reducer
    ddp.logger = logger = Logger(reducer)
    reducer.set_logger(logger)
    logger.set_construction_data_and_log(
        type(ddp.module).__name__,
        ddp.device_ids or [],
        -1 if ddp.output_device is None else ddp.output_device,
        getattr(ddp, "forward_sync_buffers", ddp.broadcast_buffers),
        any(isinstance(part, nn.SyncBatchNorm) for part in ddp.module.modules()),
        ddp.static_graph,
    )
    if ddp.static_graph:
        reducer._set_static_graph()  # noqa: SLF001
        logger._set_static_graph()  # noqa: SLF001
        ddp._static_graph_delay_allreduce_enqueued = False  # noqa: SLF001
    ddp._comm_hooks = []  # noqa: SLF001 they belonged to the reducer before
    is_manual = "require_manual_backward_finalization"  # from 2.15 on
    if getattr(ddp, is_manual, False):
        setattr(ddp, is_manual, True)  # which tells the reducer


def has_reduced_since(ddp: TorchDDP, before: list[int]) -> tuple[bool, list[int]]:
    """Return whether gradients were averaged since ``before``, and what to give as that next time.

    torch notes for each parameter how many nanoseconds into a synchronised pass its gradient came,
    and leaves that alone in passes that are not synchronised, so another note is another pass. The
    first pass of a static graph leaves no note.
    """
    now = noted_gradients(ddp)
    return now != before and any(now), now


def noted_gradients(ddp: TorchDDP) -> list[int]:
    """Return the nanoseconds into the last synchronised pass at which gradients came; 0: not yet.

    They are in the order of the reducer's parameters. Passes without synchronisation leave them
    alone.
    """
    return list(ddp.reducer.get_backward_stats())


def awaits_first_static_pass(ddp: TorchDDP) -> bool:
    """Return whether torch still waits for a static graph's first backward pass, to send all then.

    It sees that pass end in what forward returns. Where backward runs inside of forward, it never
    does, and somebody else has to send: for each new reducer.
    """
    return ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued  # noqa: SLF001


@contextmanager
def sees_first_static_pass(ddp: TorchDDP) -> Iterator[None]:
    """Have what forward returns tell the end of a static graph's first pass, if it is one by then.

    torch sees that pass end in what forward returned while there was none yet. Another reducer has
    a first pass again, which may belong to a forward pass that was over before.
    """
    was_sent = ddp._static_graph_delay_allreduce_enqueued  # noqa: SLF001
    ddp._static_graph_delay_allreduce_enqueued = False  # noqa: SLF001
    try:
        yield
    finally:
        ddp._static_graph_delay_allreduce_enqueued = was_sent  # noqa: SLF001


def first_static_pass_was_sent(ddp: TorchDDP) -> None:
    """Tell torch that the gradients of the first pass of a static graph were sent."""
    ddp._static_graph_delay_allreduce_enqueued = True  # noqa: SLF001


def require_finished_reduction(ddp: TorchDDP) -> None:
    """Raise what torch would raise in its next pass where the last one left parameters out.

    Another reducer knows nothing of it, and ranks would go on with different weights.
    """
    ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]  # noqa: SLF001


def torch_caps_bytes(ddp: TorchDDP) -> tuple[int, int]:
    """Return at how many bytes torch closes its first bucket, and all others."""
    config = getattr(ddp, "_bucket_config", None)
    if config is not None:
        return config.first_bucket_bytes_cap, config.bucket_bytes_cap
    cap: int = ddp.bucket_bytes_cap  # as torch 2.11 keeps it
    is_default = getattr(ddp, "bucket_bytes_cap_default", False)
    return (getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", cap) if is_default else cap), cap


def keeps_declared_order(ddp: TorchDDP) -> bool:
    """Return whether torch keeps its first buckets, in the order of declaration, for good.

    It does where it looks for unused parameters in each pass.
    """
    return bool(ddp.find_unused_parameters and not ddp.static_graph)


def torch_bucket_bytes(ddp: TorchDDP) -> list[int]:
    """Return the sizes of the buckets that torch says it has; empty until it says so."""
    logging_data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001
    field = "bucket_sizes" if keeps_declared_order(ddp) else "rebuilt_bucket_sizes"
    logged = str(logging_data.get(field, ""))
    return [int(size) for size in logged.split(",") if size.strip()]


def has_comm_hook(ddp: TorchDDP) -> bool:
    """Return whether there is a hook, the user's or torch's own for mixed precision."""
    return bool(ddp._comm_hooks)  # noqa: SLF001


@contextmanager
def all_requiring_grad(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Unfreeze parameters for a block: reducers and hooks cannot be attached to frozen ones.

    Whether a parameter is frozen is looked at then, and not again.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)  # noqa: FBT003
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)  # noqa: FBT003


# --- Backward passes ------------------------------------------------------------------------------


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def is_in_forward(ddp: TorchDDP) -> bool:
    """Return whether the wrapper's module is in its forward pass; False where torch does not tell.

    Of wrappers in one another that is the innermost.
    """
    return getattr(TorchDDP, "_active_ddp_module", None) is ddp


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call it when the backward pass under way has computed everything."""
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def is_in_join(wrapper: "weakref.ref[TorchDDP]") -> bool:
    """Return whether some ranks may have run out of data: from the first ``join()`` on, for good.

    Whoever asks must not keep the wrapper alive, which has to die before its process group.
    """
    ddp = wrapper()
    return ddp is not None and bool(ddp._join_config.enable)  # noqa: SLF001


# --- Profilers ------------------------------------------------------------------------------------

_NO_RANGE = nullcontext()


def named_range(text: str, *values: object) -> AbstractContextManager[object]:
    """Name what happens in a block, for profilers: the text with these values, as in logging.

    While none is on, nothing is formatted and nothing is called: one attribute is looked at. (What
    torch asks instead, record_function, takes a microsecond or two to find that out.)
    """
    if not getattr(profiler, "_is_profiler_enabled", False):
        return _NO_RANGE
    return profiler.record_function(text % values if values else text)


# --- Tensors, modules, groups ---------------------------------------------------------------------


def remove_gradient_hook(parameter: torch.Tensor, handle: RemovableHandle) -> None:
    """Remove a hook on a parameter's gradient; when it was the last, so that nothing is called.

    Otherwise each gradient would still go through Python, only to find that there is no hook. Of
    hooks on accumulated gradients that would be so for good.
    """
    handle.remove()
    if not parameter._backward_hooks:  # noqa: SLF001
        parameter._backward_hooks = None  # noqa: SLF001


def changes_in_place(tensor: torch.Tensor) -> int:
    """Return how often the tensor has been written to; fused optimizers write without a trace."""
    return tensor._version  # noqa: SLF001


# Of a subclass of tensors: computing with it gives plain ones, and takes no longer.
plain_results = torch._C._disabled_torch_function_impl  # noqa: SLF001


class RefusesStateDictFunctions:
    """A module whose parameters torch.distributed.checkpoint's get_state_dict would misread.

    That and the functions beside it ask every module on the way to a parameter how to name what is
    in it, if it says; nobody else asks. Here they are told that they cannot be used.
    """

    def _fqn_modifiers(self) -> dict[str, str]:
        raise RequestError(
            "torch.distributed.checkpoint.state_dict takes shards for whole tensors; give "
            "torch.distributed.checkpoint gradweave.TrainingState(model, optimizer), or the "
            "model's own state_dict()"
        )


def is_compiled(module: nn.Module) -> bool:
    """Return whether some of the model was compiled, by torch.compile or by its own method."""
    # Whoever compiles has imported it; to import it here would take every command two seconds.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    compiled = () if compiler is None else (compiler.OptimizedModule,)
    return any(
        isinstance(part, compiled) or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def uncompiled_name(name: str) -> str:
    """Return the name that a parameter has where nothing is compiled."""
    return name.replace("_orig_mod.", "")


def has_optimizer_in_backward(parameter: nn.Parameter) -> bool:
    """Return whether an optimizer updates the parameter as soon as its gradient has come."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_only_hook_before_step(optimizer: Optimizer) -> bool:
    """Return whether one hook alone is called before a step; False where torch does not tell."""
    of_all = getattr(optimizers, "_global_optimizer_pre_hooks", None)
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return of_all is not None and own is not None and len(of_all) == 1 and not own


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the group's time-out; None, the backend's default, where it does not tell."""
    for device in group._device_types:  # noqa: SLF001
        backend = group._get_backend(device)  # noqa: SLF001
        timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def timeout_s(group: dist.ProcessGroup) -> float:
    """Return the group's time-out in seconds, or torch's default where it does not tell."""
    return (group_timeout(group) or default_pg_timeout).total_seconds()


def devices_carried(group: dist.ProcessGroup) -> set[str]:
    """Return the types of devices whose tensors the group sends, such as "cpu" and "cuda".

    A group that somebody wrote in Python does not say; it is taken to send what is on the host.
    """
    return {device.type for device in group._device_types} or {HOST.type}  # noqa: SLF001


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of what sends tensors of a device in this group, such as "gloo"."""
    return str(group._get_backend(device).name())  # noqa: SLF001


def wait_until_let_go(begin: Callable[[], dist.Work], tensors: Iterable[torch.Tensor]) -> None:
    """Begin a message, and wait until the backend's threads do not hold its tensors any more.

    gloo's threads let go of tensors after the message is over, and need Python's lock for it: where
    a script ends meanwhile that is taken for a crash, and where somebody drops the group with that
    lock in hand it never ends.
    """
    held = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    places = range(len(held))
    before = [sys.getrefcount(held[place]) for place in places]
    begin().wait()
    given_up_s = time.monotonic() + TENSORS_LET_GO_WITHIN_S
    while time.monotonic() < given_up_s and any(
        _is_shared(held[place]) or sys.getrefcount(held[place]) > before[place] for place in places
    ):
        time.sleep(0)


def begun_sum(
    group: dist.ProcessGroup, message: torch.Tensor
) -> torch.futures.Future[list[torch.Tensor]]:
    """Begin the backend's own all-reduce; its future has the message, as torch's reducer wants it.

    torch's fake group, which stands for a world of any size, has nothing in its futures.
    """
    work = group.allreduce([message])
    if type(work).__name__ != "FakeWork":
        return work.get_future()
    over: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    over.set_result([message])
    return over


def gather_flat(group: dist.ProcessGroup, everyone: torch.Tensor, mine: torch.Tensor) -> dist.Work:
    """Begin an all-gather into one tensor, which has a place for each rank's."""
    return group._allgather_base(everyone, mine)  # noqa: SLF001


def scatter_flat(group: dist.ProcessGroup, mine: torch.Tensor, everyone: torch.Tensor) -> dist.Work:
    """Begin a reduce-scatter of one tensor, which has a place for each rank's."""
    return group._reduce_scatter_base(mine, everyone, dist.ReduceScatterOptions())  # noqa: SLF001


def _is_shared(tensor: torch.Tensor) -> bool:
    """Return whether others than Python hold it; False where torch does not tell."""
    count = getattr(tensor, "_use_count", None)
    return count is not None and count() > 1


def is_fake(group: dist.ProcessGroup) -> bool:
    """Return whether the group is torch's fake one, whose other ranks do not exist."""
    return any(
        isinstance(group._get_backend(device), FakeProcessGroup)  # noqa: SLF001
        for device in group._device_types  # noqa: SLF001
    )


def is_listed(group: dist.ProcessGroup) -> bool:
    """Return whether torch knows the group by itself, and its ranks in the whole job."""
    return group in dist.distributed_c10d._world.pg_map  # noqa: SLF001


def unlisted_gloo_group(
    store: Store,
    *,
    rank: int,
    ranks: int,
    timeout: timedelta | None,
    device: torch.device = HOST,
) -> dist.ProcessGroup:
    """Return a group that torch does not list: it goes, with its connections, when it is dropped.

    ``store`` is where its ranks meet, and must not have been used for another group.
    """
    gloo = dist.ProcessGroupGloo(store, rank, ranks, timeout or default_pg_timeout)
    group = dist.ProcessGroup(store, rank, ranks)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)  # noqa: SLF001
    for one in {HOST, device}:
        group._register_backend(one, kind, gloo)  # noqa: SLF001
    return group


# --- Clipping -------------------------------------------------------------------------------------

ClippingCheck = Callable[[list[torch.Tensor]], None]
_clipping_checks: dict[object, ClippingCheck] = {}
# Not a plain lock: whoever ends watching may be garbage that is collected while somebody begins.
_replacing = RLock()
_total_norm: Callable[..., torch.Tensor] | None = getattr(clip_grad, "_get_total_norm", None)


def watch_clipping(check: ClippingCheck) -> Callable[[], None]:
    """Call it with all gradients that torch's clip_grad_norm_ is to clip; return what ends that.

    torch has no hook there, and whoever clips has mostly imported the function itself, so the one
    that computes the norm is replaced meanwhile. Where torch lacks it, nothing is checked.
    """
    key = object()
    with _replacing:
        _clipping_checks[key] = check
        _replace_total_norm()

    def end() -> None:
        with _replacing:
            _clipping_checks.pop(key, None)
            _replace_total_norm()

    return end


def _replace_total_norm() -> None:
    if _total_norm is not None:
        clip_grad._get_total_norm = (  # noqa: SLF001
            _checked_total_norm if _clipping_checks else _total_norm
        )


def _checked_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for check in list(_clipping_checks.values()):
        check(gradients)
    assert _total_norm is not None
    return _total_norm(gradients, *args, **kwargs)
