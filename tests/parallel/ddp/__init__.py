"""Scenarios for `torch.distributed`."""
