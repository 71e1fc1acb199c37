"""``swbn study``: a grid of networks, norms and seeds, with one table at the end; docs/studies.md."""
