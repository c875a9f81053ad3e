"""Strategies for `pytorch_lightning`: its Trainer and its Fabric (docs/integrations.md)."""

from gradweave._src.checks import require_module

require_module("pytorch_lightning", what="gradweave.integrations.pytorch_lightning")

from gradweave._src.integrations.pytorch_lightning import GradweaveFabricStrategy, GradweaveStrategy  # noqa: E402

__all__ = ["GradweaveFabricStrategy", "GradweaveStrategy"]
