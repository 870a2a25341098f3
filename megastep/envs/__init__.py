"""The built-in environments, named in `megastep.rollout.env.BUILT_IN`."""
