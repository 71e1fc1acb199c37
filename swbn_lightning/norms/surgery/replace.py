"""Replace modules inside a network."""

from torch import nn

# What runs around a forward or a backward; a state dict's hooks belong to the class that registered them.
HOOKS = tuple(name for name in nn.Module().__dict__ if "hook" in name and "state_dict" not in name)


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the hooks of ``source``: the same dicts, so that existing handles keep working."""
    for name in HOOKS:
        target.__dict__[name] = source.__dict__[name]


def replace_modules(model: nn.Module, chosen: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace each key of ``chosen`` by its value everywhere; return the model, or what replaces the model itself."""

    def final(module: nn.Module) -> nn.Module:
        while module in chosen and chosen[module] is not module:
            module = chosen[module]
        return module

    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in chosen:
                parent._modules[name] = final(child)
    return final(model)
