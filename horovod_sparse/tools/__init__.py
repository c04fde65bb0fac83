"""The command line `horovod-sparse`: `check`, `try`, `plan` and `report`."""
