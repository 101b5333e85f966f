"""Perplexity against the routing budget, and the hand-over to lm-eval."""
