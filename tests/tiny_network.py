"""Networks of tiny models, written on the real API or on the double, and a reader of their caches."""

from __future__ import annotations

from collections.abc import Sequence

import tensorrt_rtx as trt
import torch
from network_graph import Graph, read_graph
from network_interpreter import Interpreter, run_ranks

from quasar_trt.builders.network.decoder import DecoderNetwork
from quasar_trt.builders.network.writer import NetworkWriter
from quasar_trt.builders.quantize import with_int8_head
from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.tree_mask import visible_rows
from quasar_trt.tensorfile import to_numpy

_BUILDER = trt.Builder(trt.Logger(trt.Logger.ERROR))


def real_network():
    """A strongly typed INetworkDefinition of TensorRT-RTX."""
    return _BUILDER.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def _add_plugin(network, *described):
    return network.add_plugin(described, aot=True).outputs


def decoder_graph(network, config, recipe, tensors, capacity=64, dtype="float32", plugins=False) -> Graph:
    """The decoder written into `network` and read back; with plugins a network is the double."""
    writer = NetworkWriter(trt, network, _add_plugin if plugins else None)
    arrays = {name: to_numpy(tensor) for name, tensor in with_int8_head(tensors, recipe).items()}
    DecoderNetwork(writer, config, recipe, arrays, capacity, dtype).write()
    return read_graph(trt, network, writer.constants)


class InterpretedDecoder:
    """Runs passes of a decoder graph, or of one for each rank, over its own caches of `slots` slots."""

    def __init__(self, *graphs: Graph, slots: int):
        self.ranks = [Interpreter(graph) for graph in graphs]
        dtype = {"FLOAT": torch.float32, "BF16": torch.bfloat16}
        self.caches = [
            {
                tensor.name: torch.zeros(slots, *tensor.shape[1:], dtype=dtype[tensor.dtype])
                for tensor in graph.inputs
                if tensor.name.startswith("past_") and len(tensor.shape) == 4
            }
            for graph in graphs
        ]

    def __call__(
        self,
        rows: list[list[int]],
        lengths: list[int],
        padding: int = 0,
        parents: dict[int, Sequence[int]] | None = None,
    ) -> list[torch.Tensor]:
        """One pass: new ids of every slot, and what each held before. Returns logits of all rows, per slot.

        Slots with fewer rows than others, and all of them by `padding`, are padded with token 0. parents: of the slots whose last rows
        are trees. Hidden states are left in `states`, by place: [batch, rows, hidden_size]."""
        width = max(map(len, rows)) + padding
        past = torch.tensor(lengths, dtype=torch.int32)
        ids = torch.zeros(len(rows), width, dtype=torch.int32)
        visible = torch.zeros(len(rows), 1, width, width + 2, dtype=torch.bool)
        visible[..., 0] = True
        positions = past[:, None] + torch.arange(width, dtype=torch.int32)
        for slot, tokens in enumerate(rows):
            count = len(tokens)
            ids[slot, :count] = torch.tensor(tokens)
            seen = torch.ones(width, width, dtype=torch.bool).tril()
            seen[:count, :count] = torch.from_numpy(visible_rows(count, (parents or {}).get(slot, ())))
            visible[slot, 0, :, 1:-1] = seen
            positions[slot, :count] = past[slot] + seen[:count, :count].sum(dim=1) - 1
        wanted = [slot * width + i for slot, tokens in enumerate(rows) for i in range(len(tokens))]
        inputs = {
            bindings.INPUT_IDS: ids,
            bindings.POSITIONS: positions,
            bindings.PAST_LENGTHS: past,
            bindings.VISIBLE: visible,
            bindings.SPAN: torch.tensor([max(lengths) + width]),
            bindings.LOGITS_ROWS: torch.tensor(wanted, dtype=torch.int32),
        }
        outputs = run_ranks(self.ranks, [inputs | caches for caches in self.caches])
        for found, caches in zip(outputs, self.caches, strict=True):
            for layer in range(len(caches) // 2):
                for past_name, present in bindings.cache_bindings(layer):
                    assert found[present].data_ptr() == caches[past_name].data_ptr()
            torch.testing.assert_close(found[bindings.LOGITS], outputs[0][bindings.LOGITS], atol=0, rtol=0)
        self.states = {
            int(name.partition(".")[2]): found.float().unflatten(0, (len(rows), width))
            for name, found in outputs[0].items()
            if name.startswith("hidden_states")
        }
        return list(outputs[0][bindings.LOGITS].float().split([len(tokens) for tokens in rows]))
