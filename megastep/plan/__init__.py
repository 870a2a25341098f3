"""`megastep plan`: whether a config fits. Nothing is allocated, no GPU is needed."""
