"""Thresholds from few numbers: fits, samples, controllers. Imports no framework."""
