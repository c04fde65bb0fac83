"""The command line: `horovod-sparse check` and `horovod-sparse bench`."""
