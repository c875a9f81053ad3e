"""Making a power of two out of any number of ranks: neighbours act as one.

With e ranks too many, ranks 0 and 1, 2 and 3, … of the first 2e form pairs. The even one, the
pair's *core*, takes part; the odd one hands over what it has before and gets the result afterwards.
"""

from dataclasses import dataclass

import numpy as np

from gradweave._src.collectives.schedule import IntArray


@dataclass(frozen=True, slots=True)
class Folding:
    ranks: int

    @property
    def cores(self) -> int:
        """The largest power of two that is not above the ranks."""
        return 1 << (self.ranks.bit_length() - 1)

    @property
    def pairs(self) -> int:
        return self.ranks - self.cores

    def rank(self, core: IntArray) -> IntArray:
        """Return the rank that plays a core, which is also the first rank it stands for."""
        return core + np.minimum(core, self.pairs)

    @property
    def evens(self) -> IntArray:
        return 2 * np.arange(self.pairs)
