"""Hypothesis: no deadlines (machines differ), and the same examples each time in continuous integration.

Programs that tests start hear Ctrl-C even if the tests themselves were started in the background, where a shell has it
ignored and children inherit that.
"""

import os
import signal

from hypothesis import HealthCheck, settings

# how long the drawing of examples takes is the machine's business too
settings.register_profile("local", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

signal.signal(signal.SIGINT, signal.default_int_handler)
