"""What older releases of torch can't do, as marks: the package refuses it there, which tests pin."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

SHARDS_REPLICAS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether gradients that only some ranks have can be exchanged; `check_shardable` asks the same."""
COMPILES_HOOKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether torch.compile traces a module with several pre-hooks: that of 2.11 takes one for another."""
TAKES_NO_GRADIENTS = COMPILES_HOOKS
"""Whether a stage may give no gradient to what it received: torch 2.11 waits for one."""

sharded_replicas = pytest.mark.skipif(not SHARDS_REPLICAS, reason=f"torch {torch.__version__} can't shard replicas")
compiled_hooks = pytest.mark.skipif(
    not COMPILES_HOOKS, reason=f"torch.compile of {torch.__version__} mistakes one hook of a module for another"
)
