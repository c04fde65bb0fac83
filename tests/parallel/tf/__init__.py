"""Scenarios for TensorFlow."""
