"""The built-in environments; each is found by the name in `megastep.rollout.env.BUILT_IN`."""
