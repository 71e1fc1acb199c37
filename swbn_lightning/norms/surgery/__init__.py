"""Whole networks: convert, fuse, freeze, update, parameter groups."""
