"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from gohvd.torch.mpi_ops import Sum, allgather_of, allreduce, size


class SyncBatchNorm(_BatchNorm):
    """Normalizes as BatchNorm would normalize the concatenation of all ranks' batches. It also runs on the CPU.

    The input has the shape (N, C, ...). N may differ between ranks, and may be 0. In training each forward pass makes
    one allgather of 2C+1 elements, and each backward pass one allreduce of 2C elements. So all ranks must make their
    passes in the same order. There are no second derivatives. As in other layers, the gradients of weight and bias are
    those of this rank's batch, and DistributedOptimizer combines them.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        tracks = self.running_mean is not None
        if not self.training and tracks:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.training and tracks:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output


class _Normalize(torch.autograd.Function):
    """Computes the normalized input. Also returns the mean and the biased variance of each channel, and the number of
    elements per channel, over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        # float16 and bfloat16 are summed in float32.
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        channels = x.size(1)
        rest = [d for d in range(x.dim()) if d != 1]
        mine = x.numel() // channels if channels else 0
        if mine > 0:
            variance, mean = torch.var_mean(x, rest, unbiased=False)
        else:
            variance, mean = x.new_zeros(channels), x.new_zeros(channels)
        row = torch.cat([mean, variance, x.new_tensor([mine])]).unsqueeze(0)
        rows = row
        if size() > 1:
            rows = allgather_of((size(), row.shape[1]), row, "sync_batch_norm.statistics")
        counts = rows[:, -1:]
        total = counts.sum()
        if total <= 1:
            raise ValueError(
                f"expected more than 1 value per channel over all ranks when training, got input size {tuple(input.shape)}"
            )
        # The variances are combined by the formula of Chan, Golub and LeVeque (1979), which subtracts no large sums.
        mean = (rows[:, :channels] * counts).sum(0) / total
        apart = rows[:, :channels] - mean
        variance = ((rows[:, channels:-1] + apart * apart) * counts).sum(0) / total

        shape = [1, channels] + [1] * (x.dim() - 2)
        invstd = torch.rsqrt(variance + eps)
        normal = (x - mean.view(shape)) * invstd.view(shape)
        ctx.save_for_backward(normal, invstd, weight)
        ctx.total, ctx.rest, ctx.shape = total, rest, shape
        ctx.mark_non_differentiable(mean, variance, total)
        if weight is None:
            output = normal.to(input.dtype, copy=True)  # the program may change the output in place
        else:
            output = (normal * weight.to(wide).view(shape) + bias.to(wide).view(shape)).to(input.dtype)
        return output, mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *unused: Any) -> tuple[torch.Tensor | None, ...]:
        again = torch.is_grad_enabled()
        with torch.no_grad():
            gradients = _Normalize._gradients(ctx, grad)
        if again:
            # normal and invstd are constants for autograd. So a second derivative would be wrong, and would be missing
            # without an error if grad is a constant too, because once_differentiable looks at grad only.
            gradients = tuple(g if g is None else _Last.apply(g.requires_grad_()) for g in gradients)
        return *gradients, None

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of input, weight and bias."""
        normal, invstd, weight = ctx.saved_tensors
        dy = grad.to(normal.dtype)
        sum_dy, sum_dy_normal = dy.sum(ctx.rest), (dy * normal).sum(ctx.rest)
        d_weight = d_bias = d_input = None
        if weight is not None:
            d_weight, d_bias = sum_dy_normal.to(weight.dtype), sum_dy.to(weight.dtype)
        # All ranks enter this branch or none, because the input requires a gradient at all ranks or at none.
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_dy, sum_dy_normal])
            if size() > 1:
                sums = allreduce(sums, name="sync_batch_norm.gradients", op=Sum)
            means = (sums / ctx.total).view([2] + ctx.shape)
            d_input = (dy - means[0] - normal * means[1]) * invstd.view(ctx.shape)
            if weight is not None:
                d_input = d_input * weight.to(normal.dtype).view(ctx.shape)
            d_input = d_input.to(grad.dtype)
        return d_input, d_weight, d_bias


class _Last(torch.autograd.Function):
    """Copies a gradient of _Normalize. Its own derivative is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> torch.Tensor:
        raise RuntimeError("SyncBatchNorm has no second derivatives")
