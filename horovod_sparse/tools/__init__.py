"""The command line `horovod-sparse`: `check`, `try` and `plan`."""
