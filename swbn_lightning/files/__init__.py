"""Files that may be anybody's: read with limits, written whole or not at all, shown safely."""
