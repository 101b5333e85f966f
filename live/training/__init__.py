"""The small OLMoE-architecture language model: its corpus, its training, its log."""
