"""Strategies for `pytorch_lightning`: its Trainer and its Fabric (docs/integrations.md)."""

from gradweave._src.integrations.pytorch_lightning import GradweaveFabricStrategy, GradweaveStrategy

__all__ = ["GradweaveFabricStrategy", "GradweaveStrategy"]
