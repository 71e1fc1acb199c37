"""Data modules of many-shot classification, one per data set."""
