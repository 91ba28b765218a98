"""Which decode steps a CUDA graph can record, decided before anything is recorded.

Recording a step that waits for the device fails, and torch's allocator may be left broken
(https://github.com/pytorch/pytorch/issues/180395). So nothing is tried: what the kernels, the weights and the experts
need is known, and `lean.engine.cuda_graphs` watches a step for what is not.
"""

from typing import NamedTuple

from lean.config import EngineConfig
from lean.kernels.serving import Need, is_recordable
from lean.model.experts import most_rows_without_host
from lean.model.load import LoadedModel
from lean.quant.weights import waits_for_host
from lean.units import ENDLESS


class Recordable(NamedTuple):
    """The decode steps that can be recorded.

    rows: sequences of the largest one; ENDLESS: any number; 0: none. why: what limits them.
    """

    rows: int
    why: str

    def rows_for(self, config: EngineConfig) -> int:
        """Sequences of the largest step that an engine with this configuration records."""
        most = config.max_num_seqs
        # Steps of all sizes are compiled, or none.
        return 0 if config.enforce_eager or (config.compile and self.rows < most) else min(self.rows, most)

    def notes(self, config: EngineConfig) -> list[str]:
        """The line that says which decode steps run without CUDA graphs, unless all are recorded, or none on demand."""
        rows = self.rows_for(config)
        if rows == config.max_num_seqs or config.enforce_eager:
            return []
        which = f"decode steps of more than {rows} sequences" if rows else "decode steps"
        return [f"{which} run without CUDA graphs: {self.why}"]


def recordable(model: LoadedModel, needs: list[Need], kernel_name: str) -> Recordable | None:
    """The decode steps of a model that can be recorded; None where there are no graphs, on a CPU.

    ``needs``: of its layers.
    """
    device = model.device
    if device.type != "cuda":
        return None
    if not is_recordable(device, needs):
        return Recordable(0, f"these kernels ({kernel_name}) read lengths on the host")
    if waits_for_host(model.module):
        return Recordable(0, "bitsandbytes' int8 products look for outliers on the host")
    rows = most_rows_without_host(model.module, device, model.info.dtype)
    why = "the products of the experts read on the host which of them were chosen" if rows < ENDLESS else ""
    return Recordable(rows, why)
