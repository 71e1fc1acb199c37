"""What ``main.py`` puts together: the parts of its trainer, what its settings mean, what it says."""
