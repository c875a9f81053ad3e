"""Strategies for Lightning's Trainer and Fabric; importing this registers them as "gradweave".

import gradweave.integrations.lightning
Trainer(strategy="gradweave")
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from gradweave._src.integrations.lightning_strategies import ForFabric, ForTrainer, register


class GradweaveStrategy(ForTrainer, DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy with our wrapper, which ``Trainer(strategy=…)`` takes."""


class GradweaveFabricStrategy(ForFabric, FabricDDPStrategy):  # type: ignore[misc]
    """Fabric's DDPStrategy with our wrapper, which ``Fabric(strategy=…)`` takes."""


register(StrategyRegistry, GradweaveStrategy)
register(STRATEGY_REGISTRY, GradweaveFabricStrategy)
