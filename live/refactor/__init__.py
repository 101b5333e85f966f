"""The Model Refactoring Engine of MoE-Prism: split experts into sub-experts and rebuild the gate."""
