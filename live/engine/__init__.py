"""The vLLM plug-in: every request carries its own routing budget k, every step runs at the largest of its batch.

``plugin.register`` is the entry point vLLM loads in each of its processes. ``transport`` carries k from a request to
the scheduler and from the scheduler to the worker; ``scheduler`` decides the k of a step; ``worker`` applies it to the
MoE layers; ``graph_banks`` keeps one bank of captured CUDA graphs per k; ``steps`` records what each step was and took.
"""
