"""What ``simmoe sweep`` is made of: cells, executors, the store that makes it resumable, saturation, reports."""
