"""The command line `horovod-sparse`: `check`, `plan` and `report`."""
