import os

# Before anything imports Triton: its kernels are interpreted, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"
