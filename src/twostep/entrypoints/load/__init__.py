"""Load on a server, and what it felt like: ``twostep bench serve``."""
