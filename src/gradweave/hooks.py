"""Communication hooks that thin gradients out in torch's own wrapper (docs/sparsification.md)."""

from gradweave._src.hooks import SparseState, gtopk, topk

__all__ = ["SparseState", "gtopk", "topk"]
