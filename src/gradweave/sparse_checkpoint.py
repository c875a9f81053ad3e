"""Save and load what compressed training keeps back, one file for each rank.

``TrainingState`` saves it together with everything else; use this module only beside checkpoints
of your own.
"""

from gradweave._src.sparse.checkpoint import load, save

__all__ = ["load", "save"]
