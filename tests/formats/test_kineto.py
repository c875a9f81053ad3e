"""Profiles of torch.profiler become traces, or one line that says what they lack."""

import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated_bytes, mutated_documents
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

import gradweave._src.cli as command_line
from gradweave import FormatError, RequestError, load_trace
from gradweave._src.errors import GradweaveError
from gradweave._src.formats.kineto import import_profile

LONGEST_LINE = 1000
MODEL = (8, 6, 3)
SHAPES = [(3,), (3, 6), (6,), (6, 8)]  # in backward order


def profiled(group: dist.ProcessGroup, folder: str) -> tuple[str, str]:
    """Of two ranks that train a small model, four steps, of which two are kept; twice."""
    model = nn.Sequential(nn.Linear(*MODEL[:2]), nn.ReLU(), nn.Linear(*MODEL[1:]))
    ddp = DistributedDataParallel(model, process_group=group)
    paths = []
    for record_shapes in (True, False):
        paths.append(f"{folder}/rank{group.rank()}-{record_shapes}.json")
        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=record_shapes,
            schedule=schedule(wait=1, warmup=1, active=2),
        ) as profiler:
            for _ in range(4):
                ddp(torch.ones(4, MODEL[0])).sum().backward()
                profiler.step()
        profiler.export_chrome_trace(paths[-1])
    with_shapes, without_shapes = paths
    return with_shapes, without_shapes


@pytest.fixture(scope="module")
def rank_0(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With and without shapes. torch.profiler starts slowly: a few seconds."""
    folder = tmp_path_factory.mktemp("profiles")
    with_shapes, without_shapes = on_processes(2, profiled, str(folder), scratch=folder)[0]
    return Path(with_shapes), Path(without_shapes)


@pytest.fixture
def real(rank_0: tuple[Path, Path]) -> Path:
    return rank_0[0]


def test_a_real_profile_has_every_gradient_in_backward_order(real: Path) -> None:
    imported = import_profile(real, batch_size=4)
    trace = imported.trace
    assert [tensor.shape for tensor in trace.tensors] == SHAPES
    assert all(tensor.bytes_per_element == 4 for tensor in trace.tensors)
    assert (imported.step, imported.steps) == (3, (2, 3))
    assert imported.all_reduces == 1
    assert not imported.on_device
    assert imported.note is None
    assert trace.forward_s > 0
    assert 0 < trace.tensors[0].ready_s < trace.backward_s


def test_steps_are_chosen_by_number(real: Path) -> None:
    assert import_profile(real, batch_size=4, step=2).step == 2
    with pytest.raises(RequestError, match="has no step 7; it has 2, 3"):
        import_profile(real, batch_size=4, step=7)


def test_gzipped_profiles_say_the_same(real: Path, tmp_path: Path) -> None:
    packed = tmp_path / real.with_suffix(".json.gz").name
    packed.write_bytes(gzip.compress(real.read_bytes()))
    assert import_profile(packed, batch_size=4) == import_profile(real, batch_size=4)
    packed.write_bytes(gzip.compress(real.read_bytes())[:-100])
    with pytest.raises(FormatError, match=r"not complete gzip .* truncated\?"):
        import_profile(packed, batch_size=4)


def test_a_profile_without_shapes_says_what_to_do(rank_0: tuple[Path, Path]) -> None:
    with pytest.raises(FormatError, match="no sizes of gradients; profile with record_shapes=True"):
        import_profile(rank_0[1], batch_size=4)


def test_the_command_writes_a_trace_that_plans_and_predicts(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.json"
    asked = ["import", str(real), "--batch-size", "4", "--output", str(output), "--name", "mine"]
    assert command_line.main(asked) == 0
    assert "1 all-reduce" in capsys.readouterr().out
    trace = load_trace(str(output))
    assert (trace.name, trace.batch_size, trace.origin) == ("mine", 4, "measured")
    simulated = ["simulate", "--trace", str(output), "--network", "k80-10gbe", "--workers", "4"]
    assert command_line.main(simulated) == 0


# A GPU runs behind its host: the host launches kernels (correlation ids tell which), goes on, and
# hands over all-reduces long before what they carry is computed.
#
#   host    0 step ............................................................ 1000
#           forward: launches 1 at 10      backward 100: launches 2 at 110, 3 at 130
#           gradients accumulated at 120 and 140, each in an all-reduce of its own
#   device  1: 50 to 250   2: 250 to 400   3: 400 to 700   NCCL: 400 to 650, 700 to 900
def host(
    name: str, ts: float, dur: float, cat: str = "cpu_op", **args: object
) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def launch(ts: float, number: int) -> dict[str, object]:
    return host("cudaLaunchKernel", ts, 2, "cuda_runtime", correlation=number)


def kernel(name: str, begin: float, end: float, number: int) -> dict[str, object]:
    return host(name, begin, end - begin, "kernel", correlation=number, stream=7)


def accumulated(ts: float, shape: list[int], kind: str) -> list[dict[str, object]]:
    name = "torch::autograd::AccumulateGrad"
    shapes = {"Input Dims": [shape], "Input type": [kind]}
    message = {"Collective name": "allreduce", "In msg nelems": 6, "dtype": "Half"}
    return [
        host(f"autograd::engine::evaluate_function: {name}", ts - 1, 9),
        host(name, ts, 1, **shapes),
        host("c10d::allreduce_", ts + 2, 3, **{"Input Dims": [[[6]], []]}),
        host("record_param_comms", ts + 2.5, 2, **message),
        launch(ts + 3, 1000 + round(ts)),
    ]


EVENTS = [
    host("ProfilerStep#5", 0, 1000, "user_annotation"),
    host("ProfilerStep#5", 40, 900, "gpu_user_annotation"),
    host("DistributedDataParallel.forward", 5, 50, "user_annotation"),
    launch(10, 1),
    host("autograd::engine::evaluate_function: MmBackward0", 100, 18),
    launch(110, 2),
    *accumulated(119, [2, 3], "c10::Half"),
    host("autograd::engine::evaluate_function: MmBackward0", 129, 5),
    launch(130, 3),
    *accumulated(139, [6], "c10::Half"),
    kernel("gemm", 50, 250, 1),
    kernel("gemm", 250, 400, 2),
    kernel("gemm", 400, 700, 3),
    kernel("ncclDevKernel_AllReduce", 400, 650, 1119),
    kernel("ncclDevKernel_AllReduce", 700, 900, 1139),
]
GPU = {"schemaVersion": 1, "traceEvents": EVENTS}


def imported(tmp_path: Path, document: object):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    return import_profile(path, batch_size=2)


def test_on_a_device_a_gradient_is_ready_when_its_last_kernel_has_ended(tmp_path: Path) -> None:
    found = imported(tmp_path, GPU)
    assert found.on_device
    assert found.all_reduces == 2
    first, second = found.trace.tensors
    microseconds = pytest.approx([150, 450])  # since forward's last kernel ended, at 250
    assert [1e6 * first.ready_s, 1e6 * second.ready_s] == microseconds
    assert 1e6 * found.trace.forward_s == pytest.approx(200)  # from the first kernel on
    # Forward is spread as backward is: a third and two thirds.
    assert 1e6 * first.forward_s == pytest.approx(200 / 3)
    assert (first.shape, first.bytes_per_element) == ((2, 3), 2)


def without(document: dict, **args: object):
    """A copy whose events named so lack their arguments, or are gone (None)."""
    kept = []
    for event in document["traceEvents"]:
        name = event["name"].replace(":", "_").replace(".", "_").replace("#", "_")
        if name not in args:
            kept.append(event)
        elif args[name] is not None:
            kept.append({**event, "args": args[name]})
    return {**document, "traceEvents": kept}


def test_without_shapes_ncclss_messages_stand_for_gradients(tmp_path: Path) -> None:
    found = imported(tmp_path, without(GPU, torch__autograd__AccumulateGrad={}))
    assert [tensor.elements for tensor in found.trace.tensors] == [6, 6]
    assert "2 messages in their place" in (found.note or "")


def test_what_was_reduced_besides_is_noted(tmp_path: Path) -> None:
    more = {"Input Dims": [[[7]], []]}
    found = imported(tmp_path, without(GPU, c10d__allreduce_=more))
    assert "14 elements, and gradients 12" in (found.note or "")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (without(GPU, c10d__allreduce_=None, record_param_comms=None), "hands over no all-reduce"),
        (without(GPU, ProfilerStep_5=None), "has no ProfilerStep#N; call the profiler's step()"),
        ({**GPU, "schemaVersion": 2}, "schemaVersion: expected 1, found 2"),
        ({"traceEvents": EVENTS}, "schemaVersion: expected 1, found None"),
        ({"schemaVersion": 1}, "not a torch.profiler trace"),
        ([], "not a torch.profiler trace"),
        ({**GPU, "traceEvents": [*EVENTS, EVENTS[0]]}, "stands twice; import the profile of one"),
        ({**GPU, "traceEvents": [*EVENTS, EVENTS[2]]}, "has 2 forward passes"),
        (without(GPU, cudaLaunchKernel=None), "launches none of the kernels"),
        (
            {**GPU, "traceEvents": [e for e in EVENTS if "evaluate" not in e["name"]]},
            "has no backward pass",
        ),
        (
            without(GPU, DistributedDataParallel_forward=None),
            "has no forward pass before its backward pass",
        ),
        (
            without(
                GPU,
                torch__autograd__AccumulateGrad={"Input Dims": [[2]], "Input type": ["c10::Odd"]},
            ),
            "gradients of type 'c10::Odd', which is none that is known",
        ),
        (
            without(GPU, torch__autograd__AccumulateGrad={}, record_param_comms=None),
            "no sizes of gradients; profile with record_shapes=True",
        ),
    ],
)
def test_what_cannot_be_known_is_one_line(tmp_path: Path, document: object, said: str) -> None:
    with pytest.raises(FormatError, match=r"profile\.json") as error:
        imported(tmp_path, document)
    assert said in str(error.value)
    assert is_one_line(str(error.value))


def is_one_line(said: str) -> bool:
    return said.isprintable() and len(said) <= LONGEST_LINE


def test_truncated_profiles_and_other_files_are_one_line(real: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    content = real.read_bytes()
    for cut in (content[: len(content) // 2], b"", b"\x00\xff", b"\x1f\x8b", b"[" * 100_000):
        path.write_bytes(cut)
        with pytest.raises(FormatError) as error:
            import_profile(path, batch_size=1)
        assert is_one_line(str(error.value))


def complaint(path: Path) -> str:
    """Empty where it can be read."""
    try:
        import_profile(path, batch_size=1)
    except GradweaveError as error:
        return str(error)
    return ""


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_changed_profiles_are_a_trace_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    path = tmp_path_factory.mktemp("mutated") / "profile.json"
    text = json.dumps(GPU)
    contents = [
        *(
            one.encode(errors="surrogatepass")
            for one in mutated_documents(text, count=10, seed=seed)
        ),
        *mutated_bytes(text.encode(), count=10, seed=seed),
        *mutated_bytes(gzip.compress(text.encode()), count=2, seed=seed),
    ]
    for content in contents:
        path.write_bytes(content)
        assert is_one_line(complaint(path))
