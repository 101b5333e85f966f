"""Everything that touches a real model: the vLLM plug-in, measuring profiles, refactoring, folding, kernels."""
