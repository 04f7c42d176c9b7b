"""The oracle: every op in NumPy, slow and obvious. Native kernels are tested against these."""

from twostep.ops.reference.backend import ReferenceBatch, ReferenceOps, ReferenceWeights

__all__ = ["ReferenceBatch", "ReferenceOps", "ReferenceWeights"]
