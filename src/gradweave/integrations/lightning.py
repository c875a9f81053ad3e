"""Strategies for `lightning`: its Trainer and its Fabric (docs/integrations.md)."""

from gradweave._src.checks import require_module

require_module("lightning", what="gradweave.integrations.lightning")

from gradweave._src.integrations.lightning import GradweaveFabricStrategy, GradweaveStrategy  # noqa: E402

__all__ = ["GradweaveFabricStrategy", "GradweaveStrategy"]
