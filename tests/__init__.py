"""A package, so that no other `tests` that stands among the installed ones (learn2learn leaves one) comes before it."""
