"""Weight sync: the policy's weights into the rollout engines."""
