"""What ``simmoe search`` is made of: the objective, the bisection, the tuner of parameters, the report."""
