"""Few-shot data sets and their class lists."""

from fewshot.datasets.registry import FewShotDataset, get_dataset, register_dataset

__all__ = ["FewShotDataset", "get_dataset", "register_dataset"]
