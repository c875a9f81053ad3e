"""Ranks that have not come, have gone, or are not reached."""

from collections.abc import Iterator

from gradweave._src.doctor import words
from gradweave._src.doctor.checkup import Checkup, Unreached, host_of_rank
from gradweave._src.doctor.verdicts.finding import Finding


def absent(checkup: Checkup) -> Iterator[Finding]:
    if not checkup.absent:
        return
    address, _, port = checkup.meeting_point.rpartition(":")
    yield Finding(
        kind="absent",
        ranks=checkup.absent,
        what=f"{words.ranks(checkup.absent)} did not come to {checkup.meeting_point} within "
        f"{checkup.timeout_s:g} s",
        advice=f"look at what is printed there, and check that it was started, that its host "
        f"reaches {address} (ping {address}), and that no firewall closes port {port}",
    )


def lost(checkup: Checkup) -> Iterator[Finding]:
    host_of = host_of_rank(checkup.hosts)
    if checkup.lost:
        hosts = dict.fromkeys(str(host_of[rank]) for rank in checkup.lost if rank in host_of)
        yield Finding(
            kind="lost",
            ranks=checkup.lost,
            what=f"{words.ranks(checkup.lost)} on {words.listed(list(hosts) or ['?'])} fell silent "
            f"while {checkup.lost_while}",
            advice="see whether the process or the host has ended (dmesg tells of killed ones) or "
            "its link was lost (ip -s link)",
        )


def unreached(checkup: Checkup, explained: set[int]) -> Iterator[Finding]:
    left = [
        one
        for one in checkup.unreached
        if one.receiver not in explained and one.sender not in explained
    ]
    host_of = host_of_rank(checkup.hosts)
    ranks = {facts.rank for facts in checkup.ranks} - explained
    for facts in checkup.ranks:
        failed = [one for one in left if one.receiver == facts.rank]
        if len(failed) > 1 and {one.sender for one in failed} == ranks - {facts.rank}:
            left = [one for one in left if one.receiver != facts.rank]
            yield Finding(
                kind="unreached",
                ranks=(facts.rank,),
                what=f"nobody reaches rank {facts.rank} on {host_of[facts.rank].name} at "
                f"{failed[0].address} ({failed[0].reason})",
                advice=_what_to_check(failed[0]),
            )
    between: dict[tuple[str, str], list[Unreached]] = {}
    for one in left:
        names = host_of[one.sender].name, host_of[one.receiver].name
        between.setdefault(names, []).append(one)
    for (sender, receiver), failed in between.items():
        first, *more = failed
        yield Finding(
            kind="unreached",
            ranks=tuple(sorted({rank for one in failed for rank in (one.sender, one.receiver)})),
            what=f"rank {first.sender} on {sender} does not reach rank {first.receiver} on "
            f"{receiver} at {first.address} ({first.reason}"
            + (f"; {len(more)} more pairs of ranks likewise)" if more else ")"),
            advice=_what_to_check(first),
        )


def _what_to_check(one: Unreached) -> str:
    if one.stage == "sending":
        return (
            "small messages pass and larger ones do not: compare the MTU of both ends and of the "
            f"switch between them (ping -M do -s 1472 {one.address})"
        )
    return (
        f"check the route (ping {one.address}) and that no firewall stands between: all TCP ports "
        "must be open among hosts"
    )


def gloo(checkup: Checkup) -> Iterator[Finding]:
    if checkup.gloo_problem is not None:
        yield Finding(
            kind="gloo",
            ranks=tuple(facts.rank for facts in checkup.ranks),
            what=f"gloo could not connect its ranks ({checkup.gloo_problem}), though plain TCP did",
            advice="set GLOO_SOCKET_IFNAME on all hosts to the interface that they share",
        )
