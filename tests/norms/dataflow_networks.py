"""A convolution, a norm, and every way in which one may lead to the other; for the tests of fusing."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class Plain(Net):
    def forward(self, x):
        return self.norm(self.conv(x))


class AfterAddition(Net):
    def forward(self, x):
        return self.norm(self.conv(x) + x)


class UsedTwice(Net):
    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class TwoCalls(Net):
    def forward(self, x):
        return self.norm(self.conv(self.norm(self.conv(x))))


class WeightUsed(Net):
    def forward(self, x):
        return self.norm(self.conv(x)) + torch.nn.functional.conv2d(x, self.conv.weight)


class Controlled(Net):
    def forward(self, x):
        if x.sum() > 0:  # cannot be traced
            x = x + 1
        return self.block(self.conv(x))


class Optional(Net):
    def forward(self, x, skip=None):
        y = self.conv(x)
        if skip is not None:
            y = y + skip
        return self.norm(y)


class Flag(Net):
    def forward(self, x, features=False):
        y = self.conv(x)
        return y if features else self.norm(y)


class Untraceable(Net):
    def forward(self, x, taps=None):
        y = self.conv(x)
        for _ in taps or ():  # cannot be traced with taps given
            return y
        return self.norm(y)


class KeepsFeatures(Net):
    def forward(self, x):
        self.features = {"raw": [self.conv(x)]}
        return self.norm(self.features["raw"][0])


class Counting(Net):
    def __init__(self, **modules):
        super().__init__(**modules)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.norm(self.conv(x))
