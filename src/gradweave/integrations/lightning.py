"""Strategies for `lightning`: its Trainer and its Fabric (docs/integrations.md)."""

from gradweave._src.integrations.lightning import GradweaveFabricStrategy, GradweaveStrategy

__all__ = ["GradweaveFabricStrategy", "GradweaveStrategy"]
