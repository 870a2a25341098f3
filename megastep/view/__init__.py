"""A run to look at: its curves as a picture, its trajectories and tokens as a page."""
