"""Recorded routing in Ray's object stores."""

import ray
from ray.exceptions import ObjectLostError

from megastep.errors import RoutingLost


def get_routing(references: list) -> list:
    """The objects of these references; arrays are views of the object store."""
    try:
        return ray.get(references)
    except ObjectLostError as error:
        reason = str(error).splitlines()[0]
        raise RoutingLost(
            f"recorded routing is lost: its node, or the process that kept it, ended ({reason})"
        ) from None
