"""The paper's Algorithms 1 and 3, literally, in float64 numpy; nothing here is shared with the package.

Zhang et al., CVPR 2021. Columns are samples, as printed there: X is d x n.
"""

import numpy as np


class ReferenceSWBN:
    def __init__(self, d, criterion, step_size, eps=1e-8, eta=0.95, groups=1):
        self.groups, self.criterion, self.alpha, self.eps, self.eta = groups, criterion, step_size, eps, eta
        self.w = [np.eye(d // groups) for _ in range(groups)]
        self.mu_e, self.v_e = np.zeros(d), np.ones(d)
        self.gamma, self.beta = np.ones(d), np.zeros(d)

    def train(self, x):
        d, n = x.shape
        mu = x.sum(axis=1) / n  # 1
        v = ((x - mu[:, None]) ** 2).sum(axis=1) / (n - 1)  # 2
        self.mu_e = self.eta * self.mu_e + (1 - self.eta) * mu  # 3
        self.v_e = self.eta * self.v_e + (1 - self.eta) * v  # 4
        x_s = self._standardize(x, mu, v)  # 5
        k = d // self.groups
        for g in range(self.groups):
            block = x_s[g * k : (g + 1) * k]
            sigma = block @ block.T / n  # 6
            w = self.w[g] - self.alpha * self._delta(self.w[g], sigma)  # 7
            self.w[g] = 0.5 * (w + w.T)  # 8
        return self._output(x_s)

    def _delta(self, w, sigma):
        c = w @ sigma @ w.T - np.eye(len(w))
        if self.criterion == "kl":
            return c @ w
        norm = np.sqrt((c**2).sum())
        return c @ w @ sigma / norm if norm > 0 else np.zeros_like(w)

    def predict(self, x):
        return self._output(self._standardize(x, self.mu_e, self.v_e))  # Algorithm 3

    def frozen(self, x):
        """Training output with W held fixed: the function that the task loss differentiates."""
        n = x.shape[1]
        mu = x.sum(axis=1) / n
        v = ((x - mu[:, None]) ** 2).sum(axis=1) / (n - 1)
        return self._output(self._standardize(x, mu, v))

    def _standardize(self, x, mu, v):
        return np.diag((v + self.eps) ** -0.5) @ (x - mu[:, None])

    def _output(self, x_s):
        k = len(x_s) // self.groups
        x_w = np.concatenate([self.w[g] @ x_s[g * k : (g + 1) * k] for g in range(self.groups)])  # 9
        return x_w * self.gamma[:, None] + self.beta[:, None]  # 10


def to_columns(x):
    """[N, C, ...] to d x n."""
    return np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)


def from_columns(y, shape):
    return np.moveaxis(y.reshape(shape[1], shape[0], *shape[2:]), 0, 1)


def correlated(rng, shape):
    """Images with channels that share a part, of different scale and far from zero mean."""
    d = shape[1]
    mixing = rng.normal(size=(d, d)) + 2 * rng.normal(size=(d, 1))
    x = np.moveaxis(np.tensordot(mixing, rng.normal(size=shape), axes=(1, 1)), 0, 1)
    scale = np.exp(rng.normal(size=d)).reshape(1, d, *[1] * (len(shape) - 2))
    return x * scale + 3 * scale
