"""The operators of Assay: torch.ops.assay with defaults and documentation.

Sequences are [B, T, heads, size] or [B, T, channels]. This is not the layout [B, heads, T, size] of
scaled_dot_product_attention. Every operator has a gradient for each tensor that is real-valued, and
takes float64, float32 and bfloat16 on CPU and CUDA. Recurrences return their state, and continue
from `initial_state`: a sequence may be cut anywhere. Log decays are not above 0.

In attention and Top-1, k and v may have fewer heads than q where their number divides that of q. In
the recurrences but rwkv7, tensors may have different numbers of heads where each divides the
largest. A wrong shape, dtype, device or value is a ValueError that names the argument, and what is
not a tensor in place of one is a TypeError.
"""

import functools
import inspect

from . import _library

_library.load()

import torch  # noqa: E402

_ops = torch.ops.assay


def _scale(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else scale


def window_attention(q, k, v, window, scale=None, alibi_slopes=None, sinks=None, decay_sums=None):
    """Causal softmax attention over the last `window` positions, the own one included; -1: all.

        out_t = sum_j p_tj v_j,  p_t = softmax over t - window < j <= t of scale q_t.k_j
                                       [- alibi_slopes (t - j)] [+ c_t - c_j]

    q [B, T, H, D]; k, v [B, S, Hk, D] with S >= T: the queries are the last T positions;
    alibi_slopes [H]; scale: 1 / sqrt(D) by default. With sinks [H], the softmax of a row of head h
    has one more score, sinks[h], whose value is zero. decay_sums [B, S, H] is c, the sums of log
    decays along time [Lin et al. 2025, eq. 4]. Returns out [B, T, H, D].
    """
    return _ops.window_attention(q, k, v, window, _scale(scale, q), alibi_slopes, sinks, decay_sums)


def top1_element(q, k, v, scale=None):
    """The value of the one position with the largest score; the gradient is that of the softmax.

        out_t = v_i,  i = argmax over j <= t of q_t.k_j

    q [B, T, H, D]; k, v [B, S, Hk, D], S >= T; scale: 1 / sqrt(D) by default, for the gradient.
    Returns out [B, T, H, D] and index [B, H, T] int64, the position that was read.
    """
    return _ops.top1_element(q, k, v, _scale(scale, q))


def top1_chunk(
    q,
    k,
    v,
    chunk_size,
    scale=None,
    selection="exact",
    top_k=1,
    selected=None,
    summaries=None,
):
    """One softmax over the own chunk and the `top_k` earlier chunks with the largest scores.

        exact   score of chunk c: log sum over j in c of exp(scale q_t.k_j)
        approx  q_t . mean over j in c of k_j

    q [B, T, H, D]; k, v [B, S, Hk, D], S >= T; selected [B, H, T, top_k] int64 forces the choice
    (-1: none), and a chunk that is named twice counts twice; summaries:
    chunk_summaries(k, chunk_size), by a caller who keeps them; only their shape is checked.
    Returns out [B, T, H, D], logsumexp [B, H, T] and selected [B, H, T, top_k]. Only out has a
    gradient.
    """
    return _ops.top1_chunk(
        q,
        k,
        v,
        chunk_size,
        _scale(scale, q),
        selection=selection,
        top_k=top_k,
        selected=selected,
        summaries=summaries,
    )


def chunk_summaries(k, chunk_size):
    """The mean of the keys of each full chunk. No gradient.

    k [B, S, Hk, D]. Returns [B, S // chunk_size, Hk, 1, D]; of bfloat16 keys, in bfloat16,
    [.., 2, D], where the sum of the two rows is the mean.
    """
    return _ops.chunk_summaries(k, chunk_size)


def selective_scan(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    initial_state=None,
):
    """The recurrence of Mamba-1.

        d_t = softplus(delta_t + delta_bias)         without delta_softplus: the sum itself
        S_t = exp(d_t A) * S_{t-1} + (d_t u_t) B_t^T
        y_t = (S_t C_t + D u_t) * silu(z_t)

    u, delta, z [B, T, Dm]; A [Dm, N], or [B, T, N] shared by the channels; B, C [B, T, G, N], G
    divides Dm; D, delta_bias [Dm]; initial_state [B, Dm, N].
    Returns y [B, T, Dm] and the state after the last step [B, Dm, N].
    """
    return _ops.selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state)


def ssd(
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    initial_state=None,
    chunk_size=64,
):
    """The recurrence of Mamba-2: one decay per head.

        d_t = softplus(dt_t + dt_bias)               without dt_softplus: the sum itself
        S_t = exp(d_t A) S_{t-1} + d_t x_t B_t^T
        y_t = (S_t C_t + D x_t) * silu(z_t)

    x, z [B, T, H, P]; dt [B, T, H]; A, D, dt_bias [H]; B, C [B, T, G, N], G divides H;
    initial_state [B, H, P, N]. chunk_size changes the speed and not the result.
    Returns y [B, T, H, P] and the state [B, H, P, N].
    """
    return _ops.ssd(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, chunk_size)


def linear_attention(q, k, v, scale=None, initial_state=None):
    """S_t = S_{t-1} + k_t v_t^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; initial_state [B, H, K, V]; scale: 1 / sqrt(K) by default.
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    return _ops.linear_attention(q, k, v, _scale(scale, q), initial_state)


def simple_gla(q, k, v, g, scale=None, initial_state=None):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; g [B, T, H] log decays; initial_state [B, H, K, V]; scale:
    1 / sqrt(K) by default. Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    return _ops.simple_gla(q, k, v, g, _scale(scale, q), initial_state)


def gla(q, k, v, gk, scale=None, initial_state=None):
    """S_t = diag(exp gk_t) S_{t-1} + k_t v_t^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; gk [B, T, H, K] log decays; initial_state [B, H, K, V];
    scale: 1 / sqrt(K) by default. Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    return _ops.gla(q, k, v, gk, _scale(scale, q), initial_state)


def delta_rule(q, k, v, beta, scale=None, initial_state=None):
    """S_t = S_{t-1} + k_t beta_t (v_t - S_{t-1}^T k_t)^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; beta [B, T, H]; initial_state [B, H, K, V]; scale:
    1 / sqrt(K) by default. Keys are not normalised: with beta |k|^2 above 2 the state grows.
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    return _ops.delta_rule(q, k, v, beta, _scale(scale, q), initial_state)


def gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None):
    """S' = exp(g_t) S_{t-1},  S_t = S' + k_t beta_t (v_t - S'^T k_t)^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; g (log decays) and beta [B, T, H]; initial_state
    [B, H, K, V]; scale: 1 / sqrt(K) by default. Keys are not normalised.
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    return _ops.gated_delta_rule(q, k, v, g, beta, _scale(scale, q), initial_state)


def rwkv5(r, k, v, w, u, scale=1.0, initial_state=None):
    """S_t = diag(exp w) S_{t-1} + k_t v_t^T,  out_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t

    r, k [B, T, H, K]; v [B, T, H, V]; w (log decays) and u [H, K]; initial_state [B, H, K, V].
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    return _ops.rwkv5(r, k, v, w, u, scale, initial_state)


def rwkv6(r, k, v, w, u, scale=1.0, initial_state=None):
    """S_t = diag(exp w_t) S_{t-1} + k_t v_t^T,  out_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t

    r, k [B, T, H, K]; v [B, T, H, V]; w [B, T, H, K] log decays; u [H, K]; initial_state
    [B, H, K, V]. Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    return _ops.rwkv6(r, k, v, w, u, scale, initial_state)


def rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None):
    """S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,  out_t = scale S_t^T r_t

    The general rule: a reads the state before the decay. r, w, k, a, b [B, T, H, K], w log decays;
    v [B, T, H, V]; initial_state [B, H, K, V].
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    return _ops.rwkv7(r, w, k, v, a, b, scale, initial_state)


def longhorn(
    x, dt, k, q, D=None, z=None, dt_bias=None, exact=False, initial_state=None
):
    """The state of each channel answers an online regression from keys to inputs.

        b_t = sigmoid(dt_t + dt_bias),  e_t = b_t / (1 + b_t k_t.k_t)
        S_t = (1 - e_t k_t^2) * S_{t-1} + (e_t x_t) k_t^T            diagonal
        S_t = S_{t-1} (I - e_t k_t k_t^T) + (e_t x_t) k_t^T          exact
        y_t = (S_t q_t + D x_t) * silu(z_t)

    x, z [B, T, Dm]; dt [B, T, Dm], or [B, T, 1] for one b of all channels; k, q [B, T, N]; D [Dm];
    dt_bias [Dm], or [1] as dt has; initial_state [B, Dm, N].
    Returns y [B, T, Dm] and the state [B, Dm, N].
    """
    return _ops.longhorn(x, dt, k, q, D, z, dt_bias, exact, initial_state)


def taylor_exp_attention(q, k, v, scale=None, normalize=True, eps=1e-12, initial_state=None):
    """Attention with the second-order Taylor series of the exponential.

        w_tj  = 1 + s + s^2 / 2,  s = scale q_t.k_j,  j <= t
        out_t = sum_j w_tj v_j / (sum_j w_tj + eps)          without normalize: not divided

    q, k [B, T, H, K]; v [B, T, H, V]; initial_state [B, H, F, V + 1], F = 1 + K + K (K + 1) / 2;
    scale: 1 / sqrt(K) by default. Returns out [B, T, H, V] and the state [B, H, F, V + 1].
    """
    return _ops.taylor_exp_attention(q, k, v, _scale(scale, q), normalize, eps, initial_state)


def causal_conv1d(x, weight, bias=None, activation="none", initial_state=None):
    """Depthwise convolution over the last K positions, followed by "none" or "silu".

        y_t = activation(bias + sum_j weight_j * x_{t - (K - 1) + j})

    x [B, T, Dm]; weight [Dm, K], K <= 32; bias [Dm]; initial_state [B, Dm, K - 1], the inputs
    before x, oldest first. Returns y [B, T, Dm] and the last K - 1 inputs [B, Dm, K - 1].
    """
    return _ops.causal_conv1d(x, weight, bias, activation, initial_state)


__all__ = [
    name
    for name, value in list(globals().items())
    if getattr(value, "__module__", None) == __name__ and not name.startswith("_")
]


def _with_type_errors(function):
    """The function, which names an argument that must be a tensor where the call fails."""
    schema = getattr(_ops, function.__name__).default._schema
    tensors = {argument.name for argument in schema.arguments if "Tensor" in str(argument.type)}
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (AttributeError, RuntimeError, ValueError):
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                is_absent = value is None and signature.parameters[name].default is None
                if name in tensors and not is_absent and not isinstance(value, torch.Tensor):
                    raise _library.wrong_type(
                        f"assay.ops.{function.__name__}", name, value
                    ) from None
            raise

    return call


for _name in __all__:
    globals()[_name] = _with_type_errors(globals()[_name])
