"""An Accelerator that wraps with our class (docs/integrations.md)."""

from gradweave._src.integrations.accelerate import InUse, use_gradweave

__all__ = ["InUse", "use_gradweave"]
