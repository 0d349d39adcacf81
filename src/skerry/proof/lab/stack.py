"""M copies of the built-in model as one program: a leading learner axis, batched matrix products, one AdamW.

All parameters lie in one array [learners, N], tensor after tensor, so a tensor is one view of it, and a learner's
fragment is a few runs of its row. A row is one learner: its loss, gradient clip, rate and Adam moments are its own, and
one step of the stack is what `train.inner.Inner.step` does to each of the rows that take part, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from skerry.adapters.torch import layout_of_model
from skerry.algo.fragments import Fragment, Layout, gather, padded
from skerry.proof.lab.muon import Muon
from skerry.proof.lab.study import PRODUCT, Trial
from skerry.train.gpt import GPT, rotary, rotate
from skerry.train.inner import BETAS

EPS = 1e-8  # AdamW's


class Stack:
    def __init__(
        self,
        model: GPT,
        rows: int,
        weight_decay: float,
        device: str,
        precision: str,
        trial: Trial = PRODUCT,
        clip: float = 1.0,
    ) -> None:
        self.model, self.layout, self.device = model, layout_of_model(model), torch.device(device)
        self.starts = starts_of(self.layout)
        size = sum(padded(tensor.size) for tensor in self.layout.tensors)
        self.flat = torch.zeros(rows, size, device=device)
        self.moments = torch.zeros(2, rows, size, device=device)
        self.counts = np.zeros(rows, np.int64)  # Adam's own steps, for its bias correction
        self._gradient = torch.zeros(rows, size, device=device)
        self.parameters = self._views(self.flat)
        self._gradients = self._views(self._gradient)
        self._decay = weight_decay
        self._clip = clip or float("inf")
        self._betas = (BETAS[0], trial.beta2)
        self._muon = Muon(self.parameters, self.device) if trial.optimizer == "muon" else None
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        decays = torch.zeros(1, size)
        for name, view in self._views(decays).items():
            view.fill_(weight_decay if self.parameters[name].ndim > 2 else 0.0)
        self._decays = decays.to(device)
        self._heads = model.tok_emb.embedding_dim // model.head_width
        self._rotation = rotary(
            model.context, model.head_width, self.device
        )  # once: a compiler would redo it in every kernel
        self._losses, self._adamw = self._losses_of, adamw
        self._autocast = precision == "bf16" and self.device.type == "cuda"
        if self.device.type == "cuda":  # on a CPU compiling takes longer than a test
            torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention is the one that was measured
            self._losses, self._adamw = torch.compile(self._losses_of), torch.compile(adamw)

    def step(self, rows: Sequence[int], inputs: Tensor, targets: Tensor, rates: Sequence[float]) -> Tensor:
        """One inner step of these rows at these rates; the losses of all rows, still on the device.

        Every row has a batch, [rows, batch, time]; those that take no part are computed and left alone.
        """
        losses = self._losses(self.parameters, inputs, targets)
        found = torch.autograd.grad(losses.sum(), list(self.parameters.values()))
        torch._foreach_copy_(list(self._gradients.values()), list(found))
        self.counts[rows] += 1
        table = self._coefficients(rows, rates)
        first, second = self.moments
        adamw = partial(self._adamw, self.flat, self._gradient, first, second, self._decays, table, self._clip)
        if self._muon:
            self._muon.instead(adamw, self._gradients, table[0, :, 0], self._decay)
        else:
            adamw()
        return losses.detach()

    def _coefficients(self, rows: Sequence[int], rates: Sequence[float]) -> Tensor:
        """Per row: rate, 1 − β1, 1 − β2 and both bias corrections; a row that takes no part has rate and weights 0."""
        table = np.zeros((5, len(self.counts)), np.float32)
        table[3:] = 1.0
        taking = list(rows)
        table[0, taking] = rates
        for k, beta in enumerate(self._betas):
            table[1 + k, taking] = 1 - beta
            table[3 + k, taking] = 1 - beta ** self.counts[taking]
        host = torch.from_numpy(table)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True).unsqueeze(-1)

    def _losses_of(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            logits = forward(parameters, self._heads, self._rotation, inputs)
        each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return each.view(len(inputs), -1).mean(1)

    @torch.no_grad()
    def held_out(self, values: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Mean loss of one model, given as a row of all parameters."""
        own = self._views(values[None])
        total = torch.zeros(1, device=self.device, dtype=torch.float64)
        for inputs, targets in batches:
            total += self._losses_of(own, inputs[None], targets[None])
        return total.item() / len(batches)

    @property
    def state(self) -> list[Tensor]:
        """All that steps change; who writes into one of these changes it."""
        momenta = self._muon.momenta.values() if self._muon else ()
        return [self.flat, self.moments, torch.from_numpy(self.counts), *momenta]

    # ------------------------------------------------------------------------------------------ rows and fragments

    def runs(self, row: Tensor, fragment: Fragment) -> Iterator[tuple[Tensor, slice]]:
        """What a fragment is of a row of all parameters: views, each with its place in the flat fragment."""
        for slot in fragment.slots:
            start = self.starts[slot.name] + slot.start
            yield row[start : start + slot.size], slice(slot.offset, slot.offset + slot.size)

    def row_of(self, fragments: Sequence[Fragment], values: Sequence[Tensor]) -> Tensor:
        """Flat fragments as one row of all parameters."""
        row = torch.zeros_like(self.flat[0])
        for fragment, flat in zip(fragments, values, strict=True):
            for run, at in self.runs(row, fragment):
                run.copy_(flat[at])
        return row

    def reset(self, row: int) -> None:
        """A new process begins with fresh moments."""
        self.moments[:, row].zero_()
        if self._muon:
            self._muon.reset(row)
        self.counts[row] = 0

    def initial(self) -> Tensor:
        """The model's own values, as a row."""
        row = torch.zeros_like(self.flat[0])
        own = self._views(row[None])
        for name, parameter in self.model.named_parameters():
            own[name][0] = parameter.detach()
        return row

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter as a view [rows, *shape] into [rows, N]."""
        return {
            t.name: flat[:, self.starts[t.name] : self.starts[t.name] + t.size].unflatten(1, t.shape).detach()
            for t in self.layout.tensors
        }


def initial(model: GPT, device: torch.device | str, fragment: Fragment) -> Tensor:
    """A fragment of the model's own values."""
    arrays = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
    return torch.from_numpy(gather(fragment, arrays)).to(device)


def starts_of(layout: Layout) -> dict[str, int]:
    """Where each tensor begins in a row: on a block, so that matrices lie as a GPU likes them."""
    stops = accumulate(padded(tensor.size) for tensor in layout.tensors)
    return {tensor.name: stop - padded(tensor.size) for tensor, stop in zip(layout.tensors, stops, strict=True)}


def forward(parameters: dict[str, Tensor], heads: int, rotation: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
    """`train.gpt.GPT` with a leading row axis: [rows, batch, time] int64 -> logits [rows, batch · time, 256]."""
    rows, batch, time = tokens.shape
    embedding = parameters["tok_emb.weight"]
    values, width = embedding.shape[1:]
    first = values * torch.arange(rows, device=tokens.device)
    x = F.embedding(tokens.flatten(1) + first[:, None], embedding.reshape(-1, width))  # [rows, batch · time, width]
    layers = sum(name.endswith("qkv.weight") for name in parameters)
    for own in (_under(parameters, f"blocks.{layer}.") for layer in range(layers)):
        qkv = _linear(_norm(x, own["attention_norm.weight"]), own["attention.qkv.weight"])
        query, key, value = qkv.view(rows * batch, time, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        x = x + _linear(mixed.transpose(1, 2).reshape(rows, batch * time, width), own["attention.out.weight"])
        up = _linear(_norm(x, own["mlp_norm.weight"]), own["mlp.up.weight"])
        x = x + _linear(F.gelu(up), own["mlp.down.weight"])
    return _linear(_norm(x, parameters["norm.weight"]), parameters["head.weight"])


def _under(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) * gain[:, None]


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


@torch.no_grad()
def adamw(
    flat: Tensor, gradient: Tensor, first: Tensor, second: Tensor, decays: Tensor, table: Tensor, clip: float
) -> None:
    """Clip each row, then AdamW as torch.optim has it, in place."""
    rate, fresh_first, fresh_second, correction_first, correction_second = table
    norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    gradient = gradient * (clip / (norms + 1e-6)).clamp(max=1.0)
    first.lerp_(gradient, fresh_first)
    second.lerp_(gradient * gradient, fresh_second)
    flat.mul_(1 - rate * decays)
    flat.sub_(rate * (first / correction_first) / ((second / correction_second).sqrt() + EPS))
