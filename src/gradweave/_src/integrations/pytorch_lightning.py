"""The strategies of `gradweave.integrations.lightning`, for users of `pytorch_lightning`.

import gradweave.integrations.pytorch_lightning
Trainer(strategy="gradweave")
"""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from gradweave._src.integrations.lightning_strategies import ForFabric, ForTrainer, register


class GradweaveStrategy(ForTrainer, DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy with our wrapper, which ``Trainer(strategy=…)`` takes."""


class GradweaveFabricStrategy(ForFabric, FabricDDPStrategy):  # type: ignore[misc]
    """Fabric's DDPStrategy with our wrapper, which ``Fabric(strategy=…)`` takes."""


register(StrategyRegistry, GradweaveStrategy)
register(STRATEGY_REGISTRY, GradweaveFabricStrategy)
