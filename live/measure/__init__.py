"""Measuring step times on a real engine; see README.md for what each clock means."""

from simmoe.live.measure.measuring import MeasuredModel, Measuring
from simmoe.live.measure.run import check_begun, measure

__all__ = ["MeasuredModel", "Measuring", "check_begun", "measure"]
