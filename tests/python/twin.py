"""The mixer gla of C++ in PyTorch, with the names and shapes of its parameters."""

import torch
from torch import nn

import assay.ops


class LowRank(nn.Module):
    def __init__(self, d_model, rank, width):
        super().__init__()
        self.down_proj = nn.Linear(d_model, rank, bias=False)
        self.up_proj = nn.Linear(rank, width)

    def forward(self, x):
        return self.up_proj(self.down_proj(x))


class Twin(nn.Module):
    """Gated linear attention. "Quotes" and \\ are kept."""

    def __init__(self, d_model, num_heads: int = 4):
        super().__init__()
        self.H, self.K, self.V = num_heads, d_model // 2, d_model
        self.qkvg_proj = nn.Linear(d_model, 2 * self.K + 2 * self.V, bias=False)
        self.gk = LowRank(d_model, 16, self.K)
        self.norm = nn.RMSNorm(self.V // num_heads, eps=1e-5)
        self.out_proj = nn.Linear(self.V, d_model, bias=False)

    def forward(self, x, state):
        q, k, v, z = self.qkvg_proj(x).split([self.K, self.K, self.V, self.V], -1)
        q, k, v = (t.unflatten(-1, (self.H, -1)) for t in (q, k, v))
        decay = nn.functional.logsigmoid(self.gk(x)).unflatten(-1, (self.H, -1)) / 16
        before = state["S"] if state else None
        y, after = assay.ops.gla(q, k, v, decay, initial_state=before)
        return self.out_proj(self.norm(y).flatten(2) * nn.functional.silu(z)), {"S": after}
