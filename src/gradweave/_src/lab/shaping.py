"""How a rate becomes a token bucket, and a delay a netem queue before it."""

from errno import ENOENT, EOPNOTSUPP
from typing import Any

from msgspec import Struct
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from gradweave._src.errors import LabError

MAX_SEGMENT_BYTES = 65536  # what TCP hands to an interface at once, at most
FRAME_BYTES = 1514
_NETEM = "1:"
_TBF, _OTHER_TBF = "2:", "3:"


class TokenBucket(Struct, frozen=True, kw_only=True):
    """The kernel's ``tbf``: a rate, the bytes that may pass at once, the bytes that may wait."""

    bits_per_s: int
    burst_bytes: int
    limit_bytes: int

    @property
    def segment_bytes(self) -> int:
        """The largest packet that TCP should build, so that the bucket need not cut it up."""
        return min(MAX_SEGMENT_BYTES, self.burst_bytes // 2)


def token_bucket(bits_per_s: int) -> TokenBucket:
    bytes_per_s = bits_per_s / 8
    return TokenBucket(
        bits_per_s=bits_per_s,
        burst_bytes=max(4 * FRAME_BYTES, round(bytes_per_s * 1e-3)),
        limit_bytes=max(10**6, round(bytes_per_s * 50e-3)),
    )


def shape(ipr: IPRoute, index: int, bucket: TokenBucket | None, *, delay_s: float) -> None:
    """Put the queues in place, or change those that are there."""
    if delay_s:
        _delay(ipr, index, bucket, delay_s=delay_s)
    if bucket:
        ipr.tc(
            "replace",
            "tbf",
            index=index,
            handle=_bucket_handle(ipr, index, bucket),
            **({"parent": "1:1"} if delay_s else {}),
            rate=bucket.bits_per_s // 8,
            burst=bucket.burst_bytes,
            limit=bucket.limit_bytes,
        )


def _bucket_handle(ipr: IPRoute, index: int, bucket: TokenBucket) -> str:
    """Return the handle of the present bucket, so that its queue stays, or a new one.

    A waiting packet may be as large as the present bucket lets pass at once. A smaller bucket would
    never have enough tokens for it, and everything behind it would wait for ever. So a smaller one
    begins with an empty queue, and TCP sends again what was in the old one.
    """
    present = _present_bucket(ipr, index)
    if present is None:
        return _TBF
    is_smaller = bucket.burst_bytes < token_bucket(_bits_per_s(present)).burst_bytes
    has_first = present["handle"] == int(_TBF[:-1]) << 16
    return _OTHER_TBF if has_first == is_smaller else _TBF


def _delay(ipr: IPRoute, index: int, bucket: TokenBucket | None, *, delay_s: float) -> None:
    """Put netem first and the bucket inside it: a packet waits out the delay, then for its turn."""
    in_flight_bytes = delay_s * (bucket.bits_per_s / 8 if bucket else 10**10)
    waiting_bytes = in_flight_bytes + (bucket.limit_bytes if bucket else 0)
    try:
        ipr.tc(
            "replace",
            "netem",
            index=index,
            handle=_NETEM,
            delay=round(delay_s * 1e6),
            limit=max(1000, round(waiting_bytes / FRAME_BYTES)),  # in packets
        )
    except NetlinkError as error:
        if error.code in (ENOENT, EOPNOTSUPP):
            raise LabError(
                "this kernel has no netem, so it cannot delay packets; run without --delay"
            ) from None
        raise


def shaped_bits_per_s(ipr: IPRoute, index: int) -> int | None:
    """Return the rate to which the kernel holds this interface; None where it is not shaped."""
    present = _present_bucket(ipr, index)
    return None if present is None else _bits_per_s(present)


def _present_bucket(ipr: IPRoute, index: int) -> Any:
    """Return what the kernel says of the interface's bucket; None where it has none."""
    found = (one for one in ipr.get_qdiscs(index=index) if one.get_attr("TCA_KIND") == "tbf")
    return next(found, None)


def _bits_per_s(qdisc: Any) -> int:
    return int(qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"]) * 8
