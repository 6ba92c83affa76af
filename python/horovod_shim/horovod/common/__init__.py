"""The modules of horovod.common, which the frameworks share."""
