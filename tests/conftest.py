"""Hypothesis: no deadlines (machines differ), and the same examples each time in continuous integration."""

import os

from hypothesis import HealthCheck, settings

# how long the drawing of examples takes is the machine's business too
settings.register_profile("local", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
