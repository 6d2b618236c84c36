"""Job files, data and the command line."""
