"""The module horovod.runner.common.util."""
