"""Staleness: weight syncs since each trained token was sampled.

synced_versions = [188, 190, 192]    a token of version 190 has staleness 1, of 192 staleness 0
"""

from bisect import bisect_right
from collections import Counter
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

    def tokens(self, group: Group) -> Counter[int]:
        """Staleness → trained tokens, of all steps of the group. An array of all tokens would take
        gigabytes for a batch of a cluster."""
        counts: Counter[int] = Counter()
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                start = 0
                for version, length in step.versions.tolist():
                    trained = np.count_nonzero(step.loss_mask[start : start + length])
                    start += length
                    if trained:
                        counts[self._staleness(version)] += int(trained)
        return counts

    def _staleness(self, version: int) -> int:
        return len(self.synced_versions) - bisect_right(self.synced_versions, version)

    def drop_stale(self, groups: list[Group], limit: int) -> tuple[list[Group], list[Dropped]]:
        """Drop the groups that have a trained token of staleness above `limit`."""
        kept: list[Group] = []
        dropped: list[Dropped] = []
        for group in groups:
            stalest = max(self.tokens(group), default=0)
            if stalest <= limit:
                kept.append(group)
            else:
                reason = f"staleness {stalest}, limit {limit}"
                dropped += [Dropped(group.id, t.index, reason) for t in group.trajectories]
        return kept, dropped

    def metrics(self, groups: list[Group], limit: int) -> dict[str, float]:
        """The distribution of staleness over trained tokens, from 0 to at least `limit`."""
        counts: Counter[int] = Counter()
        for group in groups:
            counts += self.tokens(group)
        if not counts:
            return {}
        total = counts.total()
        metrics = {
            "staleness/mean": sum(value * count for value, count in counts.items()) / total,
            "staleness/max": max(counts),
        }
        for value in range(max(limit, max(counts)) + 1):
            metrics[f"staleness/fraction_{value}"] = counts[value] / total
        return metrics
