"""What ``cli.py`` puts together: the parts of its trainer, what its settings mean, what it says."""
