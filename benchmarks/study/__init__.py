"""A grid of networks, norms and seeds through the ``swbn`` command, with one table at the end; docs/studies.md."""
