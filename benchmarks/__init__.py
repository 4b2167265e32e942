"""Programs that print a table: `python -m benchmarks.NAME`."""
