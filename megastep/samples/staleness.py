"""How old is what is trained on? The age of a token: the policies that the engines were given since it was sampled.

synced_versions = [188, 190, 192], newest last      a token of version 190 has age 1, one of 192 age 0
"""

from dataclasses import dataclass, field

import numpy as np

from megastep.samples.filters import Dropped
from megastep.types import Group

_KEPT = 256  # policies remembered


@dataclass
class StalenessTracker:
    synced_versions: list[int] = field(default_factory=list)  # versions, ascending

    def record_sync(self, version: int) -> None:
        if (
            version not in self.synced_versions[-1:]
        ):  # an engine that gets the same weights again has no other policy
            self.synced_versions = [*self.synced_versions, version][-_KEPT:]

    def of(self, group: Group) -> np.ndarray:
        """[trained tokens] of all its steps."""
        steps = [step for t in group.trajectories for step in t.steps]
        versions = [np.repeat(s.versions[:, 0], s.versions[:, 1])[s.loss_mask] for s in steps]
        sampled = np.concatenate([np.zeros(0, np.int32), *versions])
        return len(self.synced_versions) - np.searchsorted(
            self.synced_versions, sampled, side="right"
        )

    def drop_stale(self, groups: list[Group], limit: int) -> tuple[list[Group], list[Dropped]]:
        """The groups without a token older than `limit`: what may be trained on, whatever the schedule was."""
        kept, dropped = [], []
        for group in groups:
            oldest = self.of(group).max(initial=0)
            if oldest <= limit:
                kept.append(group)
            else:
                why = f"{oldest} versions old"
                dropped += [Dropped(group.id, t.index, why) for t in group.trajectories]
        return kept, dropped

    def metrics(self, groups: list[Group], limit: int) -> dict[str, float]:
        """The distribution over trained tokens, up to the oldest that there may be."""
        staleness = np.concatenate([np.zeros(0, int), *map(self.of, groups)])
        if not len(staleness):
            return {}
        counts = np.bincount(staleness, minlength=limit + 1)
        shares = {
            f"staleness/fraction_{age}": count / len(staleness) for age, count in enumerate(counts)
        }
        return {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": int(staleness.max()),
            **shares,
        }
