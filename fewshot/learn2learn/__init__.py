"""Use learn2learn's data sets and tasks with our methods, and our episodes with its algorithms.

learn2learn (Arnold et al., 2020) is imported only where it is used. Everything else works without it.
"""

from fewshot.learn2learn.datamodule import Learn2LearnDataModule
from fewshot.learn2learn.tasks import TaskBatch, TaskEpisodes, TaskSplit
from fewshot.learn2learn.taskset import EpisodeTaskset

__all__ = ["EpisodeTaskset", "Learn2LearnDataModule", "TaskBatch", "TaskEpisodes", "TaskSplit"]
