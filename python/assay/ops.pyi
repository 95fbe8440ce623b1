"""Made by tools/stubs.py."""

from torch import Tensor

def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = 'none',
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Depthwise convolution over the last K positions, followed by "none" or "silu".

        y_t = activation(bias + sum_j weight_j * x_{t - (K - 1) + j})

    x [B, T, Dm]; weight [Dm, K], K <= 32; bias [Dm]; initial_state [B, Dm, K - 1], the inputs
    before x, oldest first. Returns y [B, T, Dm] and the last K - 1 inputs [B, Dm, K - 1].
    """
    ...

def chunk_summaries(
    k: Tensor,
    chunk_size: int,
) -> Tensor:
    """The mean of the keys of each full chunk. No gradient.

    k [B, S, Hk, D]. Returns [B, S // chunk_size, Hk, 1, D]; of bfloat16 keys, in bfloat16,
    [.., 2, D], where the sum of the two rows is the mean.
    """
    ...

def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + k_t beta_t (v_t - S_{t-1}^T k_t)^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; beta [B, T, H]; initial_state [B, H, K, V]; scale:
    1 / sqrt(K) by default. Keys are not normalised: with beta |k|^2 above 2 the state grows.
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    ...

def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S' = exp(g_t) S_{t-1},  S_t = S' + k_t beta_t (v_t - S'^T k_t)^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; g (log decays) and beta [B, T, H]; initial_state
    [B, H, K, V]; scale: 1 / sqrt(K) by default. Keys are not normalised.
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    ...

def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp gk_t) S_{t-1} + k_t v_t^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; gk [B, T, H, K] log decays; initial_state [B, H, K, V];
    scale: 1 / sqrt(K) by default. Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    ...

def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + k_t v_t^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; initial_state [B, H, K, V]; scale: 1 / sqrt(K) by default.
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    ...

def longhorn(
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    exact: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state of each channel answers an online regression from keys to inputs.

        b_t = sigmoid(dt_t + dt_bias),  e_t = b_t / (1 + b_t k_t.k_t)
        S_t = (1 - e_t k_t^2) * S_{t-1} + (e_t x_t) k_t^T            diagonal
        S_t = S_{t-1} (I - e_t k_t k_t^T) + (e_t x_t) k_t^T          exact
        y_t = (S_t q_t + D x_t) * silu(z_t)

    x, z [B, T, Dm]; dt [B, T, Dm], or [B, T, 1] for one b of all channels; k, q [B, T, N]; D [Dm];
    dt_bias [Dm], or [1] as dt has; initial_state [B, Dm, N].
    Returns y [B, T, Dm] and the state [B, Dm, N].
    """
    ...

def rwkv5(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp w) S_{t-1} + k_t v_t^T,  out_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t

    r, k [B, T, H, K]; v [B, T, H, V]; w (log decays) and u [H, K]; initial_state [B, H, K, V].
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    ...

def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp w_t) S_{t-1} + k_t v_t^T,  out_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t

    r, k [B, T, H, K]; v [B, T, H, V]; w [B, T, H, K] log decays; u [H, K]; initial_state
    [B, H, K, V]. Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    ...

def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,  out_t = scale S_t^T r_t

    The general rule: a reads the state before the decay. r, w, k, a, b [B, T, H, K], w log decays;
    v [B, T, H, V]; initial_state [B, H, K, V].
    Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    ...

def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-1.

        d_t = softplus(delta_t + delta_bias)         without delta_softplus: the sum itself
        S_t = exp(d_t A) * S_{t-1} + (d_t u_t) B_t^T
        y_t = (S_t C_t + D u_t) * silu(z_t)

    u, delta, z [B, T, Dm]; A [Dm, N], or [B, T, N] shared by the channels; B, C [B, T, G, N], G
    divides Dm; D, delta_bias [Dm]; initial_state [B, Dm, N].
    Returns y [B, T, Dm] and the state after the last step [B, Dm, N].
    """
    ...

def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,  out_t = scale S_t^T q_t

    q, k [B, T, H, K]; v [B, T, H, V]; g [B, T, H] log decays; initial_state [B, H, K, V]; scale:
    1 / sqrt(K) by default. Returns out [B, T, H, V] and the state [B, H, K, V].
    """
    ...

def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2: one decay per head.

        d_t = softplus(dt_t + dt_bias)               without dt_softplus: the sum itself
        S_t = exp(d_t A) S_{t-1} + d_t x_t B_t^T
        y_t = (S_t C_t + D x_t) * silu(z_t)

    x, z [B, T, H, P]; dt [B, T, H]; A, D, dt_bias [H]; B, C [B, T, G, N], G divides H;
    initial_state [B, H, P, N]. chunk_size changes the speed and not the result.
    Returns y [B, T, H, P] and the state [B, H, P, N].
    """
    ...

def taylor_exp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    normalize: bool = True,
    eps: float = 1e-12,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with the second-order Taylor series of the exponential.

        w_tj  = 1 + s + s^2 / 2,  s = scale q_t.k_j,  j <= t
        out_t = sum_j w_tj v_j / (sum_j w_tj + eps)          without normalize: not divided

    q, k [B, T, H, K]; v [B, T, H, V]; initial_state [B, H, F, V + 1], F = 1 + K + K (K + 1) / 2;
    scale: 1 / sqrt(K) by default. Returns out [B, T, H, V] and the state [B, H, F, V + 1].
    """
    ...

def top1_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int,
    scale: float | None = None,
    selection: str = 'exact',
    top_k: int = 1,
    selected: Tensor | None = None,
    summaries: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One softmax over the own chunk and the `top_k` earlier chunks with the largest scores.

        exact   score of chunk c: log sum over j in c of exp(scale q_t.k_j)
        approx  q_t . mean over j in c of k_j

    q [B, T, H, D]; k, v [B, S, Hk, D], S >= T; selected [B, H, T, top_k] int64 forces the choice
    (-1: none), and a chunk that is named twice counts twice; summaries:
    chunk_summaries(k, chunk_size), by a caller who keeps them; only their shape is checked.
    Returns out [B, T, H, D], logsumexp [B, H, T] and selected [B, H, T, top_k]. Only out has a
    gradient.
    """
    ...

def top1_element(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The value of the one position with the largest score; the gradient is that of the softmax.

        out_t = v_i,  i = argmax over j <= t of q_t.k_j

    q [B, T, H, D]; k, v [B, S, Hk, D], S >= T; scale: 1 / sqrt(D) by default, for the gradient.
    Returns out [B, T, H, D] and index [B, H, T] int64, the position that was read.
    """
    ...

def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    decay_sums: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention over the last `window` positions, the own one included; -1: all.

        out_t = sum_j p_tj v_j,  p_t = softmax over t - window < j <= t of scale q_t.k_j
                                       [- alibi_slopes (t - j)] [+ c_t - c_j]

    q [B, T, H, D]; k, v [B, S, Hk, D] with S >= T: the queries are the last T positions;
    alibi_slopes [H]; scale: 1 / sqrt(D) by default. With sinks [H], the softmax of a row of head h
    has one more score, sinks[h], whose value is zero. decay_sums [B, S, H] is c, the sums of log
    decays along time [Lin et al. 2025, eq. 4]. Returns out [B, T, H, D].
    """
    ...
