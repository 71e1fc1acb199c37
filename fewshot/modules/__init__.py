"""Episodic LightningModules, one per method."""
