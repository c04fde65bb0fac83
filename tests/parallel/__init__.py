"""Tests that run on several processes, under mpirun and horovodrun."""
