"""Batch and route policies: pure functions of a view, the same objects in the simulator and inside vLLM."""
