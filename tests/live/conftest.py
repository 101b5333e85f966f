"""Engines on few cores: threads that spin for one another cost a tiny model many times what it computes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
