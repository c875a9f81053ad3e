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

_LIBRARIES = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "pytorch_lightning": ["pytorch_lightning"],
    "transformers": ["transformers", "accelerate"],
}
# Those whose libraries are installed.
__all__ = [name for name, needed in _LIBRARIES.items() if all(map(find_spec, needed))]


def __dir__() -> list[str]:
    return __all__


# Type checkers know the names from above, and refuse all others.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LIBRARIES:
            raise AttributeError(f"module 'gradweave.integrations' has no attribute {name!r}")
        try:
            return import_module(f"gradweave.integrations.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(str(error)) from error
