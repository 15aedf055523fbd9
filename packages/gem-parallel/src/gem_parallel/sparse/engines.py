"""Look-ups in one stack of rows with the optimizer in the backward pass: by PyTorch anywhere, by FBGEMM's table kernels.

Both offer the same: ``bind(weight [N, D], accumulator [N])`` says where the rows are now (storage may be somewhere else, or nowhere,
between the two passes), ``look_up`` gives sums of bags ``[B, D]`` fp32 and a ticket, ``update(ticket, gradients [B, D])`` changes the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.errors import ConfigError
from gem_parallel.sparse.need import need
from gem_parallel.sparse.rowwise import Reads, RowwiseOptions, segment_sum, update_rows

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class TorchEngine:
    """PyTorch look-ups; rows are updated once from the sum of their gradients."""

    output = torch.float32

    def __init__(self, rows: int, dim: int, dtype: str, device: torch.device, options: RowwiseOptions, placement: str) -> None:
        if placement != "hbm":
            raise ConfigError(
                f'placement = "{placement}" needs FBGEMM on CUDA', where="parallel", fix='choose placement = "hbm", or a CUDA device'
            )
        self.options = options
        self.generator = torch.Generator(device)
        self.generator.manual_seed(torch.initial_seed() % 2**63)
        self.weight = torch.zeros(rows, dim, dtype=DTYPES[dtype], device=device)
        self.accumulator = torch.zeros(rows, device=device)

    def bind(self, weight: Tensor | None, accumulator: Tensor | None) -> None:
        self.weight = self.weight[:0].clone() if weight is None else weight
        self.accumulator = self.accumulator[:0].clone() if accumulator is None else accumulator

    @property
    def bound(self) -> tuple[Tensor, Tensor]:
        """The tensors whose storage the engine holds now."""
        return self.weight, self.accumulator

    def look_up(self, rows: Tensor, offsets: Tensor, weights: Tensor | None, trains: bool) -> tuple[Tensor, Any]:
        return segment_sum(self.weight, rows, offsets, weights).to(self.output), (rows, offsets, weights) if trains else None

    def update(self, ticket: Any, gradients: Tensor) -> None:
        reads = Reads.of(*ticket)
        update_rows(self.weight, self.accumulator, reads.rows, reads.gradients(gradients.float()), self.options, self.generator)

    def flush(self) -> None:
        """Everything is in the rows already."""


class TbeEngine:
    """FBGEMM's table-batched embedding over the stack as one table; its fused backward sums the gradients of a row, then updates it.

    The kernels keep the parameter object, not its storage, between the passes; `bind` swaps the storage under it.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        dtype: str,
        device: torch.device,
        options: RowwiseOptions,
        placement: str,
        cache_fraction: float = 0.2,
        output: torch.dtype = torch.float32,
    ) -> None:
        training = need("fbgemm_gpu.split_table_batched_embeddings_ops_training", "the fbgemm kernel")
        common = need("fbgemm_gpu.split_table_batched_embeddings_ops_common", "the fbgemm kernel")
        configs = need("fbgemm_gpu.split_embedding_configs", "the fbgemm kernel")
        if dim % 4:
            raise ConfigError(
                f"FBGEMM needs table widths that are multiples of 4, a table has {dim}", where="features", fix="change its dim"
            )
        self.options, self.cuda, self.output = options, device.type == "cuda", output
        if self.cuda and dtype == "bf16":
            raise ConfigError(
                "FBGEMM's CUDA kernels read fp32 and fp16 tables, and a table is bf16",
                where="parallel",
                fix='choose dtype = "fp16" or "fp32", or with sparse = "gem-2d" kernel = "torch"',
            )
        if self.cuda:
            where = {"hbm": "DEVICE", "uvm": "MANAGED", "uvm_caching": "MANAGED_CACHING"}[placement]
            location, compute = common.EmbeddingLocation[where], training.ComputeDevice.CUDA
        elif placement == "hbm" and dtype != "fp32":
            raise ConfigError(
                "FBGEMM's CPU kernels round 16-bit tables to nearest, which loses small updates",
                where="parallel",
                fix='choose kernel = "torch" on the CPU, or dtype = "fp32"',
            )
        elif placement == "hbm":
            location, compute = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        else:
            raise ConfigError(f'placement = "{placement}" needs a CUDA device', where="parallel", fix='choose placement = "hbm"')
        lr, eps = options.plain
        self.eps = eps
        self.module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, location, compute)],
            optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=lr,
            eps=eps,
            weights_precision=configs.SparseType[dtype.upper()],
            # the CPU's kernels give and take fp32
            output_dtype=configs.SparseType.BF16 if output == torch.bfloat16 and self.cuda else configs.SparseType.FP32,
            cache_precision=configs.SparseType.FP16 if dtype == "fp16" else configs.SparseType.FP32,
            pooling_mode=common.PoolingMode.SUM,
            stochastic_rounding=dtype != "fp32",
            cache_load_factor=cache_fraction,
            bounds_check_mode=common.BoundsCheckMode.NONE,
            device=device,
        )
        self.lr = lr
        kind = ("dev" if placement == "hbm" else "uvm") if self.cuda else "host"
        self._weight = getattr(self.module, f"weights_{kind}")
        moments = {n: t for n, t in (*self.module.named_parameters(), *self.module.named_buffers()) if n.startswith("momentum1_")}
        self._accumulator = next(t for n, t in moments.items() if n.rsplit("_", 1)[1] in ("dev", "uvm", "host") and t.numel() >= rows)
        self.weight = self._weight.detach().view(rows, dim)
        self.accumulator = self._accumulator.detach()

    def bind(self, weight: Tensor | None, accumulator: Tensor | None) -> None:
        self.weight = self._weight.data.new_empty(0, self.weight.shape[1]) if weight is None else weight
        self.accumulator = self._accumulator.data.new_empty(0) if accumulator is None else accumulator
        self._weight.data, self._accumulator.data = self.weight.view(-1), self.accumulator

    @property
    def bound(self) -> tuple[Tensor, Tensor]:
        """The tensors whose storage the kernels hold now."""
        return self._weight.data, self._accumulator.data

    def look_up(self, rows: Tensor, offsets: Tensor, weights: Tensor | None, trains: bool) -> tuple[Tensor, Any]:
        if offsets.numel() == 1:
            return torch.zeros(0, self.module.embedding_specs[0][1], dtype=self.output, device=offsets.device), None
        self._set_options()
        with torch.set_grad_enabled(trains):
            out = self.module(rows, offsets, per_sample_weights=weights)
        return out.detach().to(self.output), out if trains else None

    def update(self, ticket: Any, gradients: Tensor) -> None:
        if ticket is not None:
            self._set_options()
            ticket.backward(gradients.to(ticket.dtype))

    def flush(self) -> None:
        """Write what a device cache holds back to the rows."""
        if self.cuda:
            self.module.flush()

    def _set_options(self) -> None:
        lr, eps = self.options.plain
        if lr != self.lr:
            self.module.set_learning_rate(lr)
            self.lr = lr
        if eps != self.eps:
            self.module.optimizer_args = self.module.optimizer_args._replace(eps=eps)
            self.eps = eps


Engine = TorchEngine | TbeEngine


def engine_for(kernel: str, device: torch.device, dtype: str = "fp32") -> str:
    """ "auto" is FBGEMM on CUDA, for tables that it reads there, and PyTorch elsewhere."""
    reads = device.type == "cuda" and dtype != "bf16"
    return ("fbgemm" if reads else "torch") if kernel == "auto" else kernel


def build_engine(
    kernel: str,
    rows: int,
    dim: int,
    dtype: str,
    device: torch.device,
    options: RowwiseOptions,
    placement: str = "hbm",
    cache_fraction: float = 0.2,
    output: torch.dtype = torch.float32,
) -> Engine:
    """``output``: dtype of looked-up rows and of the gradients that are given."""
    if engine_for(kernel, device, dtype) == "torch":
        engine = TorchEngine(rows, dim, dtype, device, options, placement)
        engine.output = output
        return engine
    return TbeEngine(rows, dim, dtype, device, options, placement, cache_fraction, output)
