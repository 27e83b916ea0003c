"""What scripts import of `horovod.common.util`."""
