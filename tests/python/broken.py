"""Modules that cannot be mixers, each for one reason, and some that can."""

import torch
from torch import nn


class Good(nn.Module):
    """A gated running mean: h_t = a h_{t-1} + (1 - a) x_t."""

    def __init__(self, d_model, gate: float = 2.0):
        super().__init__()
        self.decay = nn.Parameter(torch.full((d_model,), gate))
        self.gate_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, state):
        a = self.decay.sigmoid()
        h = x.new_zeros(x[:, 0].shape) if state is None else state["h"]
        outputs = []
        for t in range(x.shape[1]):
            h = a * h + (1 - a) * x[:, t]
            outputs.append(h)
        y = self.out_proj(torch.stack(outputs, 1) * self.gate_proj(x).sigmoid())
        return y, {"h": h}


class GoodWithoutState(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        y = self.proj(x).cumsum(1)
        return y / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=y.dtype).view(1, -1, 1)


class LayerOfFla(nn.Module):
    """Names, arguments and results as in flash-linear-attention."""

    def __init__(self, hidden_size=2048, num_heads=6, mode="chunk", layer_idx=None, **kwargs):
        super().__init__()
        self.layer_idx = layer_idx
        self.scale = nn.Parameter(torch.ones(num_heads))
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def mixed(self, v):
        return v.cumsum(1) * self.scale.mean() / v.shape[1]

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False):
        return self.mixed(self.v_proj(hidden_states)), None, past_key_values


class OnlyBfloat16(LayerOfFla):
    """As with a kernel that has no other dtype."""

    def mixed(self, v):
        if v.dtype != torch.bfloat16:
            raise ValueError(f"{v.dtype} is not supported")
        return super().mixed(v.float()).to(v.dtype)


class OnlyFloat32(LayerOfFla):
    def mixed(self, v):
        return super().mixed(v.float()).to(v.dtype)


class Prints(GoodWithoutState):
    def forward(self, x):
        print("forward is called")
        return super().forward(x)


class RaisesInTriton(LayerOfFla):
    def mixed(self, v):
        import triton

        return v * triton.next_power_of_2(None)


class ReadsTheFutureInBfloat16(OnlyBfloat16):
    def mixed(self, v):
        return super().mixed(v.flip(1))


class ReadsTheFuture(GoodWithoutState):
    def forward(self, x):
        return self.proj(x) - x.mean(1, keepdim=True)


class WrongShape(GoodWithoutState):
    def forward(self, x):
        return self.proj(x)[:, :, :-1]


class WrongDtype(GoodWithoutState):
    def forward(self, x):
        return self.proj(x).double()


class NeedsEvenLength(GoodWithoutState):
    def forward(self, x):
        pairs = self.proj(x).view(x.shape[0], x.shape[1] // 2, 2, -1)
        return pairs.flatten(1, 2)


class DetachedParameter(GoodWithoutState):
    def forward(self, x):
        return x * self.proj.weight.detach().sum() + self.proj.bias


class WrongBackward(GoodWithoutState):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]  # a factor of 2 is missing

    def forward(self, x):
        return self.Square.apply(self.proj(x))


class LosesPrecision(GoodWithoutState):
    def forward(self, x):
        large = self.proj(x).to(x.dtype) + 1000
        return large - 1000


class ForgetsState(Good):
    def forward(self, x, state):
        y, state = super().forward(x, None)
        return y, state


class DropsValues(GoodWithoutState):
    def forward(self, x):
        return nn.functional.dropout(self.proj(x), 0.5)


class ScalesAtRandom(GoodWithoutState):
    def forward(self, x):
        return super().forward(x) * torch.rand(())


class MixesTheBatch(GoodWithoutState):
    def forward(self, x):
        return self.proj(x) - x.mean(0, keepdim=True)


class CountsCalls(GoodWithoutState):
    def __init__(self, d_model):
        super().__init__(d_model)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.proj(x)


class ChangesItsInput(GoodWithoutState):
    def forward(self, x):
        x.mul_(2)
        return self.proj(x)


class RaisesError(GoodWithoutState):
    def forward(self, x):
        return self.projection(x)  # no such part


class WithoutWidth(nn.Module):
    def __init__(self, size):
        super().__init__()


class Detached(GoodWithoutState):
    def forward(self, x):
        return self.proj(x).detach()


class FrozenParameter(GoodWithoutState):
    def __init__(self, d_model):
        super().__init__(d_model)
        self.proj.bias.requires_grad_(False)


class EndsTheProgram(GoodWithoutState):
    def forward(self, x):
        raise SystemExit(3)


class NeedsAnArgument(GoodWithoutState):
    def __init__(self, d_model, needed):
        super().__init__(d_model)


class BufferWithoutValues(GoodWithoutState):
    def __init__(self, d_model):
        super().__init__(d_model)
        self.register_buffer("offset", torch.zeros(d_model, device="meta"))


class StateOnAnotherDevice(GoodWithoutState):
    def forward(self, x, state):
        return super().forward(x), torch.zeros(x.shape[0], device="meta")
