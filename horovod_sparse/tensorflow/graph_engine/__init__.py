"""EXPERIMENTAL and frozen: the engine of `graph=True`, all operations of TensorFlow. Nothing else depends on it."""
