"""The few-shot data sets and their class lists."""

from fewshot.datasets.registry import FewShotDataset, available_datasets, get_dataset, register_dataset

__all__ = ["FewShotDataset", "available_datasets", "get_dataset", "register_dataset"]
