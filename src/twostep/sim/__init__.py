"""A device that is a cost model, on virtual time, driven by the real engine core."""
