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

    def with_w_fixed(self, x):
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


class ReferenceBatchWhitening:
    """IterNorm (Huang et al., CVPR 2019) and DBN (CVPR 2018), literally: X is d x n, eps on the covariance."""

    def __init__(self, d, kind, eps=1e-5, momentum=0.1, groups=1, iterations=5):
        self.kind, self.eps, self.momentum, self.groups, self.iterations = kind, eps, momentum, groups, iterations
        self.mean = np.zeros(d)
        self.matrices = [np.eye(d // groups) for _ in range(groups)]
        self.gamma, self.beta = np.ones(d), np.zeros(d)

    def batch(self, x):
        """Output, mean and matrices of a batch; changes nothing."""
        d, n = x.shape
        mean = x.sum(axis=1) / n
        k = d // self.groups
        matrices = []
        for g in range(self.groups):
            centred = (x - mean[:, None])[g * k : (g + 1) * k]
            sigma = centred @ centred.T / n + self.eps * np.eye(k)
            matrices.append(self._newton(sigma) if self.kind == "iternorm" else self._zca(sigma))
        return self._output(x, mean, matrices), mean, matrices

    def train(self, x):
        y, mean, matrices = self.batch(x)
        self.mean = (1 - self.momentum) * self.mean + self.momentum * mean
        self.matrices = [
            (1 - self.momentum) * old + self.momentum * new for old, new in zip(self.matrices, matrices, strict=True)
        ]
        return y

    def predict(self, x):
        return self._output(x, self.mean, self.matrices)

    def _newton(self, sigma):
        normalized = sigma / np.trace(sigma)
        p = np.eye(len(sigma))
        for _ in range(self.iterations):
            p = 0.5 * (3 * p - np.linalg.matrix_power(p, 3) @ normalized)
        return p / np.sqrt(np.trace(sigma))

    def _zca(self, sigma):
        values, vectors = np.linalg.eigh(sigma)
        return sum(np.outer(v, v) / np.sqrt(value) for value, v in zip(values, vectors.T, strict=True))

    def _output(self, x, mean, matrices):
        k = len(x) // self.groups
        centred = x - mean[:, None]
        white = np.concatenate([m @ centred[g * k : (g + 1) * k] for g, m in enumerate(matrices)])
        return white * self.gamma[:, None] + self.beta[:, None]


def central_difference(loss, array, place, h=1e-5):
    """Derivative of ``loss()`` by one entry of ``array``."""
    kept = array[place]
    array[place] = kept + h
    above = loss()
    array[place] = kept - h
    below = loss()
    array[place] = kept
    return (above - below) / (2 * h)
