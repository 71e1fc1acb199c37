"""Torchvision's families as small as their classes allow, and networks that look as if they had been trained."""

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models.densenet import DenseNet
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.maxvit import MaxVit
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.vgg import VGG, make_layers

from swbn_lightning.norms.base import WhiteningNorm


def _vgg():
    features = make_layers([8, "M", 16, 16, "M"], batch_norm=True)
    with torch.device("meta"):  # its own classifier has 120 million weights
        model = VGG(features, init_weights=False)
    model.classifier = nn.Sequential(nn.Linear(16 * 49, 32), nn.ReLU(), nn.Linear(32, 10))
    return model


# Family to (maker, size of its input).
TORCHVISION = {
    "vgg_bn": (_vgg, 32),
    "resnet": (lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), 32),
    "densenet": (lambda: DenseNet(8, (2, 3), 16, num_classes=10), 32),
    "inception_v3": (lambda: models.inception_v3(num_classes=10, aux_logits=False, init_weights=False), 96),
    "googlenet": (lambda: models.googlenet(num_classes=10, aux_logits=False, init_weights=False), 32),
    "shufflenet_v2": (lambda: models.shufflenet_v2_x0_5(num_classes=10), 32),
    "mobilenet_v2": (lambda: models.mobilenet_v2(num_classes=10, width_mult=0.25), 32),
    "mobilenet_v3": (lambda: models.mobilenet_v3_small(num_classes=10), 32),
    "efficientnet": (lambda: EfficientNet([MBConvConfig(4, 3, 2, 16, 24, 2, width_mult=0.5)], 0.1, num_classes=10), 32),
    "regnet_y": (lambda: models.regnet_y_400mf(num_classes=10), 32),
    "maxvit": (
        lambda: MaxVit(input_size=(32, 32), stem_channels=8, partition_size=2, block_channels=[8, 16],
                       block_layers=[1, 1], head_dim=4, stochastic_depth_prob=0.0, num_classes=10), 32,
    ),
}  # fmt: skip
_LARGE = {"densenet", "inception_v3", "googlenet", "regnet_y", "maxvit"}
FAMILIES = [pytest.param(name, marks=pytest.mark.slow) if name in _LARGE else name for name in TORCHVISION]


def lived(model, seed=0):
    """Gamma, beta and statistics as after some training; what a fresh network has hides mistakes."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(like, low, high):
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm | WhiteningNorm):
                module.weight.copy_(uniform(module.weight, 0.8, 1.2))
                module.bias.copy_(uniform(module.bias, -0.2, 0.2))
                module.running_mean.copy_(uniform(module.running_mean, -0.2, 0.2))
                module.num_batches_tracked.fill_(7)
                if getattr(module, "running_var", None) is not None:
                    module.running_var.copy_(uniform(module.running_var, 0.5, 2))
            if isinstance(module, WhiteningNorm):
                w = module.whitening_matrix
                part = torch.randn(w.shape, generator=generator, dtype=w.dtype) * 0.3 / w.shape[-1] ** 0.5
                w.add_((part + part.mT) / 2)
    return model.eval()


def relative_error(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def same_state(model, state):
    """Names, dtypes and every bit."""
    now = model.state_dict()
    return list(now) == list(state) and all(
        now[key].dtype == value.dtype and torch.equal(now[key], value) for key, value in state.items()
    )
