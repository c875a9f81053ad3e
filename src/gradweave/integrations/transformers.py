"""A Trainer of Transformers that wraps with our class (docs/integrations.md)."""

from gradweave._src.checks import require_module

require_module("transformers", what="gradweave.integrations.transformers")
require_module("accelerate", what="gradweave.integrations.transformers")

from gradweave._src.integrations.transformers import GradweaveCallback, use_gradweave  # noqa: E402

__all__ = ["GradweaveCallback", "use_gradweave"]
