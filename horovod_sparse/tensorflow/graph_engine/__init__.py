"""The engine of `graph=True`: everything as operations of TensorFlow. Experimental; nothing else depends on it."""
