"""Step costs: measured T(n, k) tables, the model of a step composed from them, roofline estimates."""
