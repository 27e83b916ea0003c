"""The names of `horovod.common` that scripts for PyTorch import."""
