"""The simulated device with torch's watch for waits of the host, as CUDA has it.

For `gradweave selftest --device sim --import accelerator.watched_sim`.
"""

import torch
from accelerator import sim

# In the time of a wait torch's wrapper reads its own timers, also without us.
TORCHS_OWN = "in _pre_forward\n    self.logger.set_runtime_stats_and_log()"


def set_sync_debug_mode(mode: str) -> None:
    """With "error", waits are noted; with "default", the first that was noted is raised.

    Waits for events are nobody's business on CUDA, either: whoever makes one means it.
    """
    if mode == "error":
        sim.reset()
        sim.trace_host_waits()
        return
    waits = [(what, stack) for what, stack in sim.host_wait_stacks() if TORCHS_OWN not in stack]
    sim.trace_host_waits(trace=False)
    hazards = sim.hazards()
    if hazards:
        raise AssertionError(hazards[0])
    if waits:
        what, stack = waits[0]
        raise AssertionError(f"the host waits for {what}: {stack.splitlines()[-1].strip()}")


sim.set_delays(1e-4)
torch.sim.set_sync_debug_mode = set_sync_debug_mode
