"""Keras adapter."""
