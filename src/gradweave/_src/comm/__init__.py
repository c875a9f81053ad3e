"""Running collectives on torch process groups."""

from gradweave._src.comm.communicator import Communicator, host_topology

__all__ = ["Communicator", "host_topology"]
