"""`megastep plan`: does a config fit, before the cluster is rented. Nothing is allocated, no GPU is needed."""
