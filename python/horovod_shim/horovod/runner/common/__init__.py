"""The module horovod.runner.common."""
