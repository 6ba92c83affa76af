"""Compression of transmitted tensors: a tensor is cast to a 16-bit type before the operation, and back after it."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """The interface of compressors, from which users can derive their own. Neither method may change its argument."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to transmit, and a context that is passed to decompress."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the received tensor in its form before compression. ctx is the context that compress returned."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Transmits tensors uncompressed."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Casts floating-point tensors to wire_dtype, and transmits other tensors unchanged."""

    wire_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        if not tensor.dtype.is_floating_point or tensor.dtype == cls.wire_dtype:
            return tensor, None
        return tensor.to(cls.wire_dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Transmits floating-point tensors as float16, which has 11 bits of mantissa and values up to 65504."""

    wire_dtype = torch.float16


class BF16Compressor(_Cast):
    """Transmits floating-point tensors as bfloat16, which has 8 bits of mantissa and the range of float32. Horovod does
    not have this compressor.
    """

    wire_dtype = torch.bfloat16


class Compression:
    """The compressors that can be passed as the argument compression."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
