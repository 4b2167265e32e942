"""One file a layer; each knows arrays, its own section of the configuration and nothing above."""
