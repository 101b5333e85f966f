"""Measuring step times on a real engine; see README.md for what each clock means."""

from simmoe.live.measure.run import MeasuredModel, Measuring, measure

__all__ = ["MeasuredModel", "Measuring", "measure"]
