"""Horovod's helpers that programs import."""
