"""What Prometheus, traces and the log tell of a running engine; all fed from StatsListener."""
