"""Measurements: twostep beside its peers, and parts of twostep alone."""
