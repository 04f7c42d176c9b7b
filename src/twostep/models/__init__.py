"""One file per architecture; ``registry.load_model`` builds them from ``loader`` checkpoints."""
