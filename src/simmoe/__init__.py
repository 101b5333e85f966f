"""simmoe: Mixture-of-Experts serving with a routing budget a request, simulated and live."""

__version__ = "0.1.0"
