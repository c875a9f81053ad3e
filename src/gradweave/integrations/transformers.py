"""A Trainer of Transformers that wraps with our class (docs/integrations.md)."""

from gradweave._src.integrations.transformers import GradweaveCallback, use_gradweave

__all__ = ["GradweaveCallback", "use_gradweave"]
