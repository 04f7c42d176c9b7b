"""The oracle: every op in NumPy, slow and obvious. Native kernels are tested against these."""
