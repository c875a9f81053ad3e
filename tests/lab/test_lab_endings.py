"""However it ends, nothing remains; and the command line says how it ended."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from lab_watching import LIMIT_S, alive, descendants, network_namespaces

import gradweave
from gradweave._src.cli import main
from gradweave._src.lab import Cluster, ClusterSpec

# A test's launcher may run where SIGINT or, under nohup, SIGHUP is ignored.
LAUNCHER = """
import signal, sys
from gradweave._src.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.exit(main())
"""
SLEEPERS = "echo up; setsid sleep 600 & sleep 600"


@pytest.fixture(params=[[], ["--loopback"]], ids=["namespaces", "loopback"])
def launcher(request, namespaces):
    """A launcher whose four ranks are up, each with a child that has left its process group."""
    command = ["lab", "--nodes", "2", "--ranks-per-node", "2", "--rate", "1gbit", *request.param]
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command, "--", "sh", "-c", SLEEPERS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for _ in range(4):
            assert process.stdout.readline().endswith("] up\n")
        yield process
        process.kill()


def wait_until_gone(processes):
    deadline_s = time.monotonic() + LIMIT_S
    while (left := alive(processes)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_nothing_outlives_a_killed_launcher(launcher, number):
    processes = descendants(launcher.pid)
    assert len(processes) >= 1 + 4 * 2
    namespaces = network_namespaces(processes) - {Path("/proc/self/ns/net").readlink()}
    launcher.send_signal(number)
    assert launcher.wait(LIMIT_S) == -number
    wait_until_gone(processes)
    # A namespace that no process is in, and that nothing else holds, does not exist.
    everywhere = {(int(e.name), 0) for e in Path("/proc").iterdir() if e.name.isdecimal()}
    assert not namespaces & _namespaces_of_the_living(everywhere)


def _namespaces_of_the_living(processes):
    found = set()
    for process in processes:
        try:
            found |= network_namespaces({process})
        except OSError:
            continue
    return found


def test_ctrl_c_ends_everything_with_130(launcher):
    processes = descendants(launcher.pid)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) == 130
    assert "Traceback" not in launcher.stderr.read()
    wait_until_gone(processes)


def test_an_exception_in_the_block_ends_everything(namespaces):
    with pytest.raises(ZeroDivisionError), Cluster(ClusterSpec(nodes=2)) as cluster:  # noqa: PT012
        job = cluster.start(["sleep", "600"])
        processes = descendants(cluster._control._process.pid)
        raise ZeroDivisionError
    wait_until_gone(processes)
    assert [found.status for found in job.wait(LIMIT_S).exits] == [-9, -9]


def test_when_the_fabric_dies_nobody_waits_for_it(namespaces):
    with Cluster(ClusterSpec(nodes=2)) as cluster:
        job = cluster.start(["sleep", "600"])
        cluster._control._process.kill()
        assert [found.status for found in job.wait(LIMIT_S).exits] == [-9, -9]
        with pytest.raises(gradweave.GradweaveError, match="the fabric ended"):
            cluster.cut(0)


def test_output_is_marked_and_a_failure_summed_up(namespaces, capsys):
    script = (
        'echo "node $GROUP_RANK"; [ $RANK = 1 ] && echo "went wrong" >&2 && exit 3; exec sleep 9'
    )
    code = main(["lab", "--nodes", "2", "--rate", "1gbit", "--", "sh", "-c", script])
    out, err = capsys.readouterr()
    assert code == 3
    assert "[rank 1] node 1\n" in out
    assert err.startswith("[rank 1] went wrong\n")
    assert "gradweave lab: rank 1 on node 1: exit code 3; its last lines:\n  " in err


def test_a_signal_is_128_more(capsys):
    assert main(["lab", "--nodes", "1", "--loopback", "--", "sh", "-c", "kill -SEGV $$"]) == 139
    err = capsys.readouterr().err
    assert err == (
        "gradweave lab: on loopback: no links, nothing is shaped\n"
        "gradweave lab: rank 0 on node 0: killed by SIGSEGV; its last lines:\n  (none)\n"
    )


def test_options_behind_the_dashes_are_the_commands(capsys):
    command = ["lab", "--nodes", "1", "--loopback", "--", "echo", "--nodes", "--", "x"]
    assert main(command) == 0
    assert capsys.readouterr().out == "[rank 0] --nodes -- x\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "1", "--loopback"], "there is no command to run"),
        (["--nodes", "1", "--rate", "1gb", "--", "true"], "'1gb' is not a rate"),
        (["--nodes", "999", "--", "true"], "nodes must be between 1 and 254, got 999"),
    ],
)
def test_a_mistake_is_one_line(capsys, options, message):
    assert main(["lab", *options]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("gradweave lab: ")
    assert message in line


def test_delay_works_or_is_refused_in_one_line(namespaces, capsys):
    code = main(["lab", "--nodes", "1", "--rate", "1gbit", "--delay", "1ms", "--", "echo", "up"])
    out, err = capsys.readouterr()
    refusal = (
        "gradweave lab: this kernel has no netem, so it cannot delay packets; run without --delay"
    )
    assert (code, out, err) in [(0, "[rank 0] up\n", ""), (2, "", f"{refusal}\n")]


def test_where_namespaces_are_forbidden_one_line_offers_loopback(namespaces):
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    lab = [sys.executable, "-c", LAUNCHER, "lab", "--nodes", "1", "--", "true"]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "-", *lab],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gradweave lab: namespaces are forbidden here (unshare: ")
    assert done.stderr.endswith("; use --loopback to run without them, unshaped\n")
    assert done.stderr.count("\n") == 1


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]


def _interpreter_for_nobody(environment):
    """Ours may lie in root's home; another of the same version does as well."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, shutil.which(f"python{version}", path="/usr/bin")):
        check = [*NOBODY, "sh", "-c", '"$0" -c "import gradweave._src.lab.fabric"', str(candidate)]
        if candidate and subprocess.run(check, env=environment, check=False).returncode == 0:
            return candidate
    return pytest.skip("no Python that an ordinary user may run")


def test_an_ordinary_user_may(namespaces, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("we are an ordinary user, so every other test shows it")
    packages = [str(Path(gradweave.__file__).parents[1]), sysconfig.get_path("purelib")]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": ":".join(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    python = _interpreter_for_nobody(environment)
    command = ["lab", "--nodes", "2", "--rate", "1gbit", "--", "cat", "/proc/self/uid_map"]
    done = subprocess.run(
        [*NOBODY, python, "-c", LAUNCHER, *command],
        capture_output=True,
        text=True,
        cwd="/",
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[2:] for line in sorted(done.stdout.splitlines())] == [
        ["0", "65534", "1"],
        ["0", "65534", "1"],
    ]
