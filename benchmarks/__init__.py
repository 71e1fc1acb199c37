"""Programs that print a table and write JSON; not part of the wheel."""
