"""`gradweave run`: a script as Python would run it, with our wrapper in place of torch's."""

import contextlib
import copy
import io
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from commands import python, run
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel

from gradweave import DistributedDataParallel, RequestError
from gradweave._src.cli import main
from gradweave._src.integrations import script
from gradweave._src.integrations.script import RANKS_NAMES, Script, run_script
from gradweave._src.integrations.stand_in import in_torchs_place, stand_in

QUICK = {"record_steps": 1, "trial_steps": 1}
TRAINING = """
import json, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train(steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    model = DDP(model, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, type(model) is DDP, isinstance(model, torch.nn.parallel.DistributedDataParallel)
"""


def ran(group, text, arguments, folder, options):
    """What a script says with ours and with torch's, and what is said of it."""
    script = folder / f"script {group.rank()}.py"
    script.write_text(TRAINING + textwrap.dedent(text))
    os.environ["RANK"] = str(group.rank())
    found, said = [], io.StringIO()
    for is_ours in (True, False):
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            if is_ours:
                code = run_script(
                    Script(name=str(script), arguments=arguments), QUICK | options, to=said
                )
            else:
                sys.argv = [str(script), *arguments]
                code = 0
                with contextlib.suppress(ZeroDivisionError):
                    runpy.run_path(str(script), run_name="__main__")
        found.append((out.getvalue(), code, errors.getvalue()))
    return found, said.getvalue(), torch.nn.parallel.DistributedDataParallel is TorchDDP


def on_two(text, *arguments, scratch, **options):
    return on_processes(2, ran, text, arguments, scratch, options, scratch=scratch)


def test_a_script_does_as_ever(tmp_path):
    """Seconds: a whole course of planning. Names, arguments and results are the script's own."""
    text = """
        import os
        losses, *kinds = train(200)
        print(json.dumps([losses, kinds, sys.argv[1:], __name__, os.path.basename(__file__)]))
        print(sys.path[0] == os.path.dirname(__file__))
    """
    for rank, (found, said, is_restored) in enumerate(
        on_two(text, "--epochs", "3", "--", "-x", scratch=tmp_path)
    ):
        (ours, code, _), (torchs, _, _) = found
        ours, torchs = ours.splitlines(), torchs.splitlines()
        assert ours[0] == torchs[0]
        assert json.loads(ours[0])[1:] == [
            [True, True],
            ["--epochs", "3", "--", "-x"],
            "__main__",
            f"script {rank}.py",
        ]
        assert ours[1] == "True"
        assert code == 0
        assert is_restored
        if rank == 0:
            assert said.startswith("gradweave (Sequential):\nMeasured: 4 gradients, ")
        else:
            assert said == ""


def test_each_wrapper_is_told_of(tmp_path):
    text = """
        print(train(5)[1:], train(3)[1:])
    """
    (_, said, _), (_, nothing, _) = on_two(text, scratch=tmp_path)
    of = re.findall(r"(?m)^gradweave, model (\d) of 2 \(Sequential\):\nNo plan yet: ", said)
    assert of == ["1", "2"]
    assert nothing == ""


def test_an_error_is_the_scripts_own(tmp_path):
    """Its traceback begins with its own lines, and what was found is told all the same."""
    text = """
        def fails():
            return 1 / 0

        train(3)
        fails()
    """
    for rank, (((_, code, errors), _), said, is_restored) in enumerate(
        on_two(text, scratch=tmp_path)
    ):
        assert code == 1
        # Torch prints whose it is where there is a group, so it does here.
        lines = [line.removeprefix(f"[rank{rank}]: ") for line in errors.splitlines()]
        assert all(line.startswith(f"[rank{rank}]: ") for line in errors.splitlines())
        assert lines[0] == "Traceback (most recent call last):"
        assert f'script {rank}.py", line ' in lines[1]
        assert lines[1].endswith(", in <module>")
        assert lines[-1] == "ZeroDivisionError: division by zero"
        assert said.startswith("gradweave (Sequential):\nNo plan yet: ") == (rank == 0)
        assert is_restored


def test_a_script_may_have_our_hook(tmp_path):
    """It ends planning, as any hook does, and sends what it sends with torch's class."""
    text = """
        import gradweave

        torch.manual_seed(0)
        model = DDP(torch.nn.Linear(6, 2))
        state = gradweave.hooks.SparseState(model, gradweave.GTopK(0.2))
        model.register_comm_hook(state, gradweave.hooks.gtopk)
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(5):
            model(torch.randn(4, 6)).square().mean().backward()
        print(model.module.weight.grad.tolist(), state.state_dict()["step"])
    """
    for (ours, torchs), said, _ in on_two(text, scratch=tmp_path):
        assert ours[:2] == torchs[:2], ours[2]
        assert (ours[1], "hook" in said) == (0, said != "")


def test_options_are_for_every_wrapper(tmp_path):
    text = """
        class Mine(DDP):
            pass

        model = Mine(torch.nn.Linear(2, 2), trial_steps=3)
        print(model._options.planner, model._options.trial_steps, type(model) is Mine)
        plain = DDP(torch.nn.Linear(2, 2), None)
        print(plain._options.planner, isinstance(plain, Mine), issubclass(Mine, DDP))
    """
    script = tmp_path / "options.py"
    script.write_text(TRAINING + textwrap.dedent(text))
    results = on_processes(2, printed, str(script), {"planner": "wfbp"}, scratch=tmp_path)
    assert results == ["wfbp 3 True\nwfbp False True\n"] * 2


def printed(group, script, options):
    out = io.StringIO()
    os.environ["RANK"] = str(group.rank())
    with contextlib.redirect_stdout(out):
        assert run_script(Script(name=script), options, to=io.StringIO()) == 0
    return out.getvalue()


def stood_in(group):
    made = []
    replacement = stand_in(QUICK, made.append)
    with in_torchs_place(replacement):
        ours = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 3))
        torchs = TorchDDP(nn.Linear(2, 3))
        is_one = [isinstance(one, replacement) for one in (ours, torchs, ours.module)]
        is_ours = [isinstance(one, DistributedDataParallel) for one in (ours, torchs, ours.module)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of groups that are not in a copy
            again = [type(copy.deepcopy(ours)), type(pickle.loads(pickle.dumps(ours)))]  # noqa: S301

            class Derived(torch.nn.parallel.DistributedDataParallel):
                pass

            derived = Derived(nn.Linear(2, 3))
            is_kept = type(AveragedModel(derived).module) is Derived
        seen = []
        ours.module.register_forward_hook(
            lambda *_: seen.append(TorchDDP._get_active_ddp_module() is ours)
        )
        ours(torch.ones(1, 2)).sum().backward()
    torch_again = torch.nn.parallel.distributed.DistributedDataParallel is TorchDDP
    assert TorchDDP._get_active_ddp_module() is None
    return is_one, is_ours, again, is_kept, seen, made == [ours, derived], torch_again


def test_what_stands_for_torchs_class_is_taken_for_it(tmp_path):
    for is_one, is_ours, again, is_kept, seen, is_told, torch_again in on_processes(
        2, stood_in, scratch=tmp_path
    ):
        assert is_one == [True, True, False]
        assert is_ours == [True, False, False]
        assert again == [DistributedDataParallel] * 2
        assert is_kept  # a script's own class
        assert seen == [True]  # torch.compile asks torch's class for it
        assert is_told
        assert torch_again


MISTAKES = {
    "no script": (["nowhere.py"], "there is no file nowhere.py"),
    "no plan": (["--plan", "nowhere.json", __file__], "there is no file nowhere.json; --plan"),
    "precision": (["--precision", "bold", __file__], "no precision 'bold'"),
    "planner": (["--planner", "bold", __file__], "no planner 'bold'"),
}


def test_a_misspelt_option_is_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--precison", "exact", __file__])
    assert "no option --precison, did you mean --precision?" in capsys.readouterr().err


def test_of_a_missing_script_only_the_script_is_missed(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--precision", "exact"])
    assert "the following arguments are required: script; see" in capsys.readouterr().err


@pytest.mark.parametrize("ours", [[], ["--precision", "exact"], ["--precision=exact"]])
def test_what_follows_the_script_is_the_scripts(capsys, tmp_path, launched, ours):
    """Also options that we do not have, and those that we do."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    theirs = ["--wrapper", "torch", "--precision", "bold", "-m", "--", "-x"]
    assert main(["run", *ours, str(script), *theirs]) == 0
    assert capsys.readouterr().out == f"{theirs}\n"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(capsys, name):
    arguments, why = MISTAKES[name]
    assert main(["run", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gradweave run: {why}")


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setenv("RANK", "0")


def test_a_process_that_nobody_launched_keeps_torchs_class(capsys, tmp_path, monkeypatch):
    """Others that the script starts know nothing of us, and all have to be alike."""
    for name in RANKS_NAMES:
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "alone.py"
    script.write_text(
        "from torch.nn.parallel import DistributedDataParallel as D\nprint(D.__mro__)"
    )
    assert main(["run", str(script)]) == 0
    out, err = capsys.readouterr()
    assert "torch" in out
    assert "gradweave" not in out
    assert err == (
        "gradweave: this process was not started by torchrun, so torch's own class is used; start "
        f"it with torchrun … -m gradweave run {script}\n"
    )
    script.write_text("raise KeyError('RANK')")
    assert main(["run", str(script)]) == 1
    assert capsys.readouterr().err.startswith("gradweave: this process was not started by torchrun")


@pytest.mark.usefixtures("launched")
def test_a_script_that_wraps_nothing_is_told_so(capsys, tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("print('done')")
    assert main(["run", str(script)]) == 0
    out, err = capsys.readouterr()
    assert out == "done\n"
    assert err.startswith("gradweave: no model was wrapped in this process")


def test_a_missing_file_of_the_scripts_is_no_mistake_of_the_commands(capsys, tmp_path):
    script = tmp_path / "reads.py"
    script.write_text("open('nowhere.txt')")
    assert main(["run", str(script)]) == 1
    assert "FileNotFoundError: [Errno 2] No such file" in capsys.readouterr().err


def test_refusals_are_raised():
    with pytest.raises(RequestError, match="there is no file"):
        run_script(Script(name="nowhere.py"), {}, to=io.StringIO())


SPAWNING = """
import multiprocessing

class Number(int):
    pass

def doubled(number):
    return Number(2 * number)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(doubled, [Number(3)]), type(pool.apply(doubled, [1])) is Number)
"""


@pytest.mark.long
@pytest.mark.parametrize("named", [("spawning.py",), ("-m", "spawning")])
def test_what_a_script_spawns_finds_the_script(tmp_path, named):
    """Seconds: as a command. As workers do that load data."""
    (tmp_path / "spawning.py").write_text(SPAWNING)
    command = (sys.executable, "-m", "gradweave", "run", *named)
    done = run(*command, cwd=tmp_path, environment={"RANK": "1"})
    assert done.stdout == "[6] True\n", done.stderr


LINGERING = """
import threading, time

def compute():
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        pass

class Last:
    def __init__(self):
        self.thread = threading.Thread(target=compute, daemon=True)
        self.thread.start()

    def __del__(self):
        print("a thread still runs:", self.thread.is_alive(), flush=True)
"""


@pytest.mark.parametrize(
    "end",
    ["", *(pytest.param(end, marks=pytest.mark.long) for end in ("raise SystemExit", "1 / 0"))],
)
def test_threads_may_end_what_they_do_before_the_scripts_names_go(tmp_path, end):
    """Else torch's reducer would wait for a thread of gloo's that waits for Python's lock."""
    (tmp_path / "lingering.py").write_text(LINGERING)  # a script with functions is not gone at once
    (tmp_path / "script.py").write_text(f"import lingering\nlast = lingering.Last()\n{end}\n")
    done = python("-m", "gradweave", "run", "script.py", cwd=tmp_path)
    assert done.stdout == "a thread still runs: False\n", done.stderr


CODES = {"exit(0)": 0, "sys.exit(7)": 7, "sys.exit('enough')": 1, "1 / 0": 1}


@pytest.mark.parametrize("code", CODES)
def test_exit_codes_are_kept(tmp_path, code):
    (tmp_path / "ends.py").write_text(f"import sys\n{code}\n")
    command = ("-m", "gradweave", "run", "-m", "ends")
    done = python(*command, cwd=tmp_path, environment={"RANK": "1"})
    assert done.returncode == CODES[code], done.stderr


@pytest.mark.long
@pytest.mark.parametrize("code", ["sys.exit(7)", "1 / 0"])
def test_exit_codes_are_kept_where_nobody_reads(tmp_path, code):
    """A second each: as a command, whose pipe is closed at its other end."""
    (tmp_path / "ends.py").write_text(f"import sys\nprint('said')\n{code}\n")
    nobody, end = os.pipe()
    os.close(nobody)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gradweave", "run", "ends.py"],
            cwd=tmp_path,
            check=False,
            env={**os.environ, "RANK": "0", "PYTHONUNBUFFERED": ""},
            stdout=end,
            stderr=end,
        )
    finally:
        os.close(end)
    assert done.returncode == CODES[code]


@pytest.mark.long
@pytest.mark.parametrize("named", [("says.py",), ("-m", "says")])
def test_a_safe_path_stays_as_it_is(tmp_path, named):
    """A second each: as a command. Python has no script's folder there then."""
    (tmp_path / "says.py").write_text("import sys\nprint(sys.path)\n")
    places = [str(tmp_path / "first"), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {
        "RANK": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }
    said = [
        run(sys.executable, *command, *named, cwd=tmp_path, environment=environment).stdout
        for command in ([], ["-m", "gradweave", "run"])
    ]
    assert str(tmp_path / "first") in said[0]
    assert said[1] == said[0]


@pytest.mark.usefixtures("launched")
def test_files_are_those_of_where_the_command_was_given(tmp_path, monkeypatch):
    """A script may go elsewhere before it wraps its model."""
    (tmp_path / "plan.json").write_text("{}")
    given = []
    monkeypatch.setattr(script, "run_script", lambda *args, **_: given.append(args[1]) or 0)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--plan", "plan.json", "--cache", "plans", "train.py"]) == 0
    assert main(["run", "--cache", "", "train.py"]) == 0
    here = {"plan": str(tmp_path / "plan.json"), "cache": str(tmp_path / "plans")}
    assert given == [here, {"cache": ""}]  # none, where it is empty
