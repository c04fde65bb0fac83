"""Thresholds from few numbers: fits, searches by counting, controllers. Imports no framework."""
