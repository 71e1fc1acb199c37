"""The papers' formulas one operation after the other, left to autograd: what an implementation without care costs."""

import torch
from torch import Tensor, nn


class _Literal(nn.Module):
    running_mean: Tensor
    running_var: Tensor
    whitening_matrix: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("whitening_matrix", torch.eye(num_features))

    def forward(self, x: Tensor) -> Tensor:
        columns = x.transpose(0, 1).reshape(x.shape[1], -1)
        y = self.whiten(columns) * self.weight[:, None].to(x.dtype) + self.bias[:, None].to(x.dtype)
        return y.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)

    def whiten(self, x: Tensor) -> Tensor:
        """Of ``[d, n]``."""
        raise NotImplementedError


class LiteralSWBN(_Literal):
    """Algorithm 1 of Zhang et al., CVPR 2021, criterion Fro."""

    step_size = 1e-5

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("running_var", torch.ones(num_features))

    def whiten(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        mean = x.mean(1, keepdim=True)
        variance = ((x - mean) ** 2).sum(1, keepdim=True) / (n - 1)
        xs = (x - mean) / torch.sqrt(variance + 1e-8)
        with torch.no_grad():
            self.running_mean.lerp_(mean.flatten().float(), 0.05)
            self.running_var.lerp_(variance.flatten().float(), 0.05)
            w = self.whitening_matrix
            s = (xs @ xs.T / n).float()
            excess = w @ s @ w.T - torch.eye(len(w), device=w.device)
            w = w - self.step_size * (excess @ w @ s) / torch.linalg.matrix_norm(excess)
            w = (w + w.T) / 2
            self.whitening_matrix.copy_(w)
        return w.to(x.dtype) @ xs


class LiteralIterNorm(_Literal):
    """Algorithm 1 of Huang et al., CVPR 2019, five iterations."""

    def whiten(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        centred = x - mean
        eye = torch.eye(len(x), device=x.device)
        s = (centred @ centred.T / x.shape[1]).float() + 1e-5 * eye
        trace = torch.trace(s)
        normalized, p = s / trace, eye
        for _ in range(5):
            p = 1.5 * p - 0.5 * p @ p @ p @ normalized
        w = p / torch.sqrt(trace)
        with torch.no_grad():
            self.running_mean.lerp_(mean.flatten().float(), 0.1)
            self.whitening_matrix.lerp_(w, 0.1)
        return w.to(x.dtype) @ centred
