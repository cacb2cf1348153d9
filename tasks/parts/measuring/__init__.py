"""Measurements of engines: latency, memory, machine state, confidence intervals and Pareto fronts."""
