"""The parts of an engine: a model bound to a cache."""

from dataclasses import dataclass, field

from lean.cache.block_manager import BlockManager
from lean.cache.disk_folder import EngineFolder
from lean.cache.kv_cache import KVCache
from lean.cache.plan import CachePlan
from lean.cache.size import CacheSize
from lean.config import EngineConfig
from lean.engine.runner import Runner
from lean.model.load import LoadedModel


@dataclass
class Parts:
    """A model bound to a cache.

    Attributes:
        plan, size: which layers share which pools, and how many blocks every pool has.
        manager: the accounting of blocks. cache: their tensors. runner: computes steps on both.
        kernel_name: the kernels that serve attention.
        notes: lines that the user should see.
        working_bytes: memory that is kept free for steps beside the cache.
        disk_folder: where the prefix cache is kept on disk; None: nowhere.
        cuda_graphs: whether decode steps are recorded. graph_bytes: memory that the records take.
    """

    config: EngineConfig
    model: LoadedModel
    plan: CachePlan
    size: CacheSize
    manager: BlockManager
    cache: KVCache
    runner: Runner
    kernel_name: str
    notes: list[str] = field(default_factory=list)
    working_bytes: int = 0
    disk_folder: EngineFolder | None = None
    cuda_graphs: bool = False
    graph_bytes: int = 0


def bind(model: LoadedModel, config: EngineConfig, plan: CachePlan, size: CacheSize, kernel_name: str) -> Parts:
    """Allocate the cache of ``plan`` and ``size`` for a loaded model. The kernels of ``kernel_name`` serve already."""
    manager = BlockManager(size.rules, config.block_size, size.num_slots)
    cache = KVCache(plan, size, model.info.layers, model.device)
    runner = Runner(model, cache, manager, config.deterministic)
    return Parts(config, model, plan, size, manager, cache, runner, kernel_name)
