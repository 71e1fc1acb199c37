"""A run's folder: what it holds, how it is read, compared and shown."""
