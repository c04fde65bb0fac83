"""One optimizer's way of the data: gradient, residual, selection, exchange, reduced gradient. Imports no framework."""
