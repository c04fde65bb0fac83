"""Gradient sparsification for stock Horovod.

Import the adapter of your framework: ``horovod_sparse.torch``. This module imports no framework.
"""

__version__ = "0.1.0"
