"""What trains a network: the modules' shared half, and the callbacks beside it."""
