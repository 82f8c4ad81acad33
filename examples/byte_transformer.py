"""A byte-level transformer small enough to train on a laptop's CPU: two layers, 64 wide, 64 bytes of context."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 64
WIDTH = 64
HEADS = 4
LAYERS = 2


class Block(nn.Module):
    """One pre-norm layer: causal attention, then a feed-forward of four times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.project_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.project_out = nn.Linear(WIDTH, WIDTH)
        self.norm_forward = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.project_in(self.norm_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(functional.gelu(self.widen(self.norm_forward(x))))


class ByteTransformer(nn.Module):
    """Predicts the next byte at each of ``CONTEXT`` places."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_in = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.bytes_out = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of ``ids``, int64 of shape (batch, CONTEXT + 1)."""
        x = self.bytes_in(ids[:, :-1]) + self.places.weight
        logits = self.bytes_out(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
