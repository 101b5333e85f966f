"""Metrics, statistics and plots over run records, whichever host wrote them."""
