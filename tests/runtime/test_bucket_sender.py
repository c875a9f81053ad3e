"""What a bucket that does not arrive is called in the log."""

import pytest

from gradweave._src.errors import CollectiveError
from gradweave._src.runtime.transports import BucketSender


class ByRing:
    def name_of(self, bucket):
        return "ring"


def test_the_first_failure_is_told_with_the_trainings_own_step(caplog):
    """Others of the same step fail because of it, and plans come and go with their senders."""
    sender = BucketSender(ByRing(), rank=3, step=lambda: 17)
    failures = [sender.failed(bucket, RuntimeError("gone")) for bucket in (1, 0, 2)]
    assert caplog.messages == ["rank 3, step 17, bucket 2 by ring: gone"]
    assert "bucket 1 by ring" in str(failures[1])
    with pytest.raises(CollectiveError, match="bucket 2 by ring"):
        sender.raise_failure()
