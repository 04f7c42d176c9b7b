"""One engine step, executed and looked at stop by stop."""
