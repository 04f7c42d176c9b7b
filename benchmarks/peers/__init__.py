"""One module for each engine that ``benchmarks.compare`` runs; see ``peers.base``."""
