"""An Accelerator that wraps with our class (docs/integrations.md)."""

from gradweave._src.checks import require_module

require_module("accelerate", what="gradweave.integrations.accelerate")

from gradweave._src.integrations.accelerate import InUse, use_gradweave  # noqa: E402

__all__ = ["InUse", "use_gradweave"]
