"""Episodic LightningModules, one a method."""
