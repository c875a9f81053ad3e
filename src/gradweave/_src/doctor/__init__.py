"""Looking a cluster over before training: what each rank has, how hosts are linked, what is wrong.

Everything here works without torch: ranks meet in a store, and send plain TCP messages to the
addresses that gloo will use, so that a rank which gloo could not reach can still be named.
"""

from gradweave._src.doctor.checkup import Checkup
from gradweave._src.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Checkup", "Diagnosis", "diagnose"]
