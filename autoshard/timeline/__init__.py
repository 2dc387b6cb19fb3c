"""When every device and every link is busy in a predicted pass, for plans of any kind.

    cuda:0        | blocks.0 | blocks.1 |          |          |
    to cuda:1                           |==|                        a copy that goes there
    cuda:1                                 | blocks.2 | head |

The events are the estimate's own seconds laid out one after another: those of a device add up to its
`compute_seconds`, and the last one ends at `latency_seconds`, unless that is longer because one thread can't launch ops
any faster. Neighbouring ops of one module are one event.
"""

from autoshard.cluster.cluster import Cluster
from autoshard.estimate import Event
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.timeline.apart import of_cuts, of_mesh
from autoshard.timeline.turns import of_placements, of_streamed

LINKS = ("transfer", "fetch", "gather", "reduce")
"""Kinds of events that occupy a link into their device, not the device."""


def events(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[Event, ...]:
    """Return what happens in one pass in the long run, in the order in which it begins.

    Raises `PlanError` for a plan that names what the model or the cluster lacks.
    """
    if plan.mesh is not None:
        found = of_mesh(plan, profile, cluster)
    elif plan.cuts:
        found = of_cuts(plan, profile, cluster)
    elif plan.streamed:
        found = of_streamed(plan, profile, cluster)
    else:
        found = of_placements(plan, profile, cluster)
    return tuple(sorted(found, key=lambda event: (event.begin_seconds, event.device, event.source)))
