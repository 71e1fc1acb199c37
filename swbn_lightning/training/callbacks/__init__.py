"""One file a callback, named for what it does."""
