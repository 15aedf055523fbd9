"""What a run would cost on a cluster, before it is launched: meshes, placement on the network's tiers, memory and time of a step.

`gem_parallel.plan.search.plan` finds the fastest candidate that fits, `gem_parallel.plan.simulate.simulate` follows one step of it over
all ranks and links. Neither needs a GPU.
"""

from __future__ import annotations
