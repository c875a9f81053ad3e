"""`gradweave doctor` in the lab and under torchrun, and what it prints."""

import json
import re
import socket

import pytest
from checkups import GIGABIT, checkup
from commands import launched, python

from gradweave._src.cli import doctor, main
from gradweave._src.doctor import diagnose
from gradweave._src.doctor.checkup import AllReduce
from gradweave._src.report.checkup_page import make_checkup_page

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def told(monkeypatch):
    """The verb, given what the ranks would have found."""

    def say(found):
        monkeypatch.setattr(doctor, "_checked", lambda _options, _question: found)

    return say


def test_tables_a_price_and_one_line_for_each_finding(capsys, told):
    all_reduces = (AllReduce(nbytes=10**6, seconds=0.02), AllReduce(nbytes=8 * 10**6, seconds=0.16))
    told(
        checkup(
            4,
            alone=lambda a, b: GIGABIT / (10 if 2 in (a, b) else 1),
            all_reduces=all_reduces,
            took_s=2.5,
        )
    )
    assert main(["doctor", "--nodes", "4"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "4 ranks on 4 hosts, looked over in 2.5 s"
    assert re.search(r"│ node0 +│ +│ +936 │ +94 │ +936 │", out)
    assert "An all-reduce of 100 MB of gradients takes 2.00 s on this network." in lines
    assert "gradweave advise" in out
    (finding,) = [line for line in lines if line.startswith("- ")]
    assert finding == (
        "- node2 (10.77.2.3): 94 Mbit/s to and from every other host, others reach 936: check its "
        "cable, port or driver (ethtool eth0); every step waits for it"
    )


def test_where_nothing_is_wrong_it_says_so(capsys, told):
    told(checkup(4))
    assert main(["doctor", "--nodes", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "No problems found."


def test_many_hosts_are_shown_by_what_each_comes_to(capsys, told):
    told(checkup(20))
    assert main(["doctor", "--nodes", "20"]) == 0
    assert re.search(r"┃ from +┃ least ┃ median ┃ largest ┃", capsys.readouterr().out)


def test_json_is_the_same_for_machines(capsys, told):
    told(checkup(4, changed={1: {"load": 20.0}}))
    assert main(["doctor", "--nodes", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in found["findings"]] == ["busy"]
    assert len(found["checkup"]["alone"]) == 12
    assert found["price"] is None


def test_the_page_is_complete_and_loads_nothing(told, tmp_path):
    told(checkup(4, alone=lambda a, b: GIGABIT / (10 if 2 in (a, b) else 1)))
    page = tmp_path / "doctor.html"
    assert main(["doctor", "--nodes", "4", "--output", str(page)]) == 0
    text = page.read_text()
    assert "1 thing to look at before training." in text
    assert text.count('class="level-9"') == 6 * 2 + 12  # alone, together, and all round trips
    assert text.count('class="level-1"') == 6 * 2
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!data:,)', text)
    assert "default-src 'none'; style-src 'sha256-" in text


def test_names_from_outside_stay_text():
    named = {"host": HOSTILE, "interface": HOSTILE, "versions": {"torch": HOSTILE}}
    page = make_checkup_page(diagnose(checkup(3, changed={1: named})))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "--nodes is missing"),
        (["--nodes", "2,4"], "a checkup is of one cluster"),
        (["--rate", "1gbit"], "--nodes is missing"),
        (["--nodes", "2", "--timeout", "30"], "'30' is not a duration"),
        (["--nodes", "2", "--timeout", "0.1s"], "expected 1s to 3600s"),
        (["--nodes", "2", "--output", "no/such/folder/doctor.html"], "there is no folder"),
        (["--nodes", "2", "--second-rate", "fast"], "'fast' is not a rate"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, argv, complaint):
    monkeypatch.delenv("RANK", raising=False)
    try:
        code = main(["doctor", *argv])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_launcher_that_sets_too_little_is_a_mistake(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == (
        "gradweave doctor: WORLD_SIZE is not set; start this by torchrun -m gradweave doctor\n"
    )


@pytest.mark.long
def test_ranks_without_namespaces(capsys):
    """Several seconds: every rank imports torch."""
    assert main(["doctor", "--nodes", "3", "--loopback", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ranks = found["checkup"]["ranks"]
    assert [(one["rank"], one["interface"], one["address"]) for one in ranks] == [
        (rank, "lo", "127.0.0.1") for rank in range(3)
    ]
    assert {(one["sender"], one["receiver"]) for one in found["checkup"]["alone"]} == {
        (0, 1),
        (1, 0),
    }
    assert len(found["checkup"]["all_reduces"]) == 2
    assert set(found["checkup"]["clock_offsets_s"]) == {"0", "1", "2"}
    assert found["price"]["gradient_bytes"] == 10**8
    # Three ranks may be more than this machine has cores; nothing else can be wrong.
    assert {one["kind"] for one in found["findings"]} <= {"threads"}


@pytest.mark.long
def test_as_under_torchrun():
    command = ("-m", "gradweave", "doctor", "--json")
    done = launched(*command, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["rank"] for one in found["checkup"]["ranks"]] == [0, 1]
    assert found["checkup"]["gloo_problem"] is None
    assert len(found["checkup"]["all_reduces"]) == 2


def test_a_rank_that_does_not_come_is_a_finding():
    """A second, for which a rank waits for another."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**place, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ("-m", "gradweave", "doctor", "--timeout", "1s")
    done = python(*command, environment=environment)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"- rank 1 did not come to 127.0.0.1:{port} within 1 s: look at what")
