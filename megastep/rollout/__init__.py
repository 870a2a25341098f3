"""Everything that makes trajectories: environments, agents, chat templates, engines."""
