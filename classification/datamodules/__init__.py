"""Data modules of many-shot classification, one a data set."""
