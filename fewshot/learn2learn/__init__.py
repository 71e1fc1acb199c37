"""learn2learn's data sets and tasks for our methods, and our episodes for its algorithms.

learn2learn (Arnold et al., 2020) is asked for where it is used, so that everything else works without it.
"""

from fewshot.learn2learn.datamodule import Learn2LearnDataModule
from fewshot.learn2learn.tasks import TaskBatch, TaskEpisodes, TaskSplit
from fewshot.learn2learn.taskset import EpisodeTaskset

__all__ = ["EpisodeTaskset", "Learn2LearnDataModule", "TaskBatch", "TaskEpisodes", "TaskSplit"]
