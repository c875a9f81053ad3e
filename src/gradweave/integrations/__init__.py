"""Gradweave's wrapper inside of other libraries' training loops; each module needs its library.

gradweave.integrations.accelerate         use_gradweave(accelerator)
gradweave.integrations.lightning          Trainer(strategy="gradweave"), and Fabric
gradweave.integrations.pytorch_lightning  the same for `pytorch_lightning`
gradweave.integrations.transformers       use_gradweave(trainer)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradweave.integrations import accelerate as accelerate
    from gradweave.integrations import lightning as lightning
    from gradweave.integrations import pytorch_lightning as pytorch_lightning
    from gradweave.integrations import transformers as transformers

__all__ = ["accelerate", "lightning", "pytorch_lightning", "transformers"]


def __dir__() -> list[str]:
    """Return those whose libraries are installed: each has the name of its library."""
    return [name for name in __all__ if find_spec(name) is not None]


# Type checkers know the names from above, and refuse all others.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'gradweave.integrations' has no attribute {name!r}")
        return import_module(f"gradweave.integrations.{name}")
