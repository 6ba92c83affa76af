"""The helpers of horovod.runner.util that programs use."""
