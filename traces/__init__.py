"""Traces as published, filters, arrival processes and budget generators: everything that makes a ``Workload``."""
