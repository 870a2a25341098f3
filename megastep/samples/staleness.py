"""Staleness: weight syncs since each trained token was sampled.

synced_versions = [188, 190, 192]    a token of version 190 has staleness 1, of 192 staleness 0
"""

from dataclasses import dataclass, field

import numpy as np

from megastep.samples.filters import Dropped
from megastep.types import Group

_MAX_VERSIONS = 256  # older ones are forgotten


@dataclass
class StalenessTracker:
    synced_versions: list[int] = field(default_factory=list)  # ascending

    def record_sync(self, version: int) -> None:
        if version in self.synced_versions[-1:]:  # the same weights again
            return
        self.synced_versions = [*self.synced_versions, version][-_MAX_VERSIONS:]

    def per_token(self, group: Group) -> np.ndarray:
        """[trained tokens] of all steps of the group."""
        versions = [np.zeros(0, np.int32)]
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                per_response_token = np.repeat(step.versions[:, 0], step.versions[:, 1])
                versions.append(per_response_token[step.loss_mask])
        sampled = np.concatenate(versions)
        synced = np.searchsorted(self.synced_versions, sampled, side="right")
        return len(self.synced_versions) - synced

    def drop_stale(self, groups: list[Group], limit: int) -> tuple[list[Group], list[Dropped]]:
        """Drop the groups that have a trained token of staleness above `limit`."""
        kept: list[Group] = []
        dropped: list[Dropped] = []
        for group in groups:
            stalest = self.per_token(group).max(initial=0)
            if stalest <= limit:
                kept.append(group)
            else:
                reason = f"staleness {stalest}, limit {limit}"
                dropped += [Dropped(group.id, t.index, reason) for t in group.trajectories]
        return kept, dropped

    def metrics(self, groups: list[Group], limit: int) -> dict[str, float]:
        """The distribution of staleness over trained tokens, from 0 to at least `limit`."""
        staleness = np.concatenate([np.zeros(0, int), *map(self.per_token, groups)])
        if not len(staleness):
            return {}
        metrics = {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": int(staleness.max()),
        }
        for value, count in enumerate(np.bincount(staleness, minlength=limit + 1)):
            metrics[f"staleness/fraction_{value}"] = count / len(staleness)
        return metrics
