"""A step table against recorded steps that took no part in its fit."""
