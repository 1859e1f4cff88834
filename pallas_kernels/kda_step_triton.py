"""The arithmetic that KDA decode, verify and fold share, so that a folded state equals the stepped one bit for bit.

It must be compiled without contraction (fuse=False) and on the same tile everywhere: the order of every
rounding is then fixed.
"""

import triton
import triton.language as tl

D = 128  # key and value channels of a head that the kernels are written for
WARPS = 4
REGISTERS = None  # a thread; the cap decides how many programs share a multiprocessor


@triton.jit
def advance(state, k, v, g, beta):
    """One token into a state [K, V]; k (normalised), g [K]; v [V]; beta scalar."""
    state = state * tl.exp(g)[:, None]
    u = beta * (v - tl.sum(state * k[:, None], axis=0))
    return tl.fma(tl.broadcast_to(k[:, None], state.shape), tl.broadcast_to(u[None, :], state.shape), state)


@triton.jit
def conv_load(row, weight, window, at, C: tl.constexpr):
    """What `conv` and `shift` need for channels `at` of C: a token, the three before it, their taps."""
    x = tl.load(row + at), tl.load(window + 2 * C + at), tl.load(window + C + at), tl.load(window + at)
    return x, load_taps(weight, at)


@triton.jit
def load_taps(weight, at):
    """The four taps of channels `at`, the newest token's first."""
    taps = weight + at * 4
    return tl.load(taps + 3), tl.load(taps + 2), tl.load(taps + 1), tl.load(taps)


@triton.jit
def conv(inputs):
    """Short convolution and SiLU, rounded to the token's dtype."""
    x, w = inputs
    y = x[3].to(tl.float32) * w[3] + x[2].to(tl.float32) * w[2]
    y = y + x[1].to(tl.float32) * w[1] + x[0].to(tl.float32) * w[0]
    return (y * tl.sigmoid(y)).to(x[0].dtype).to(tl.float32)


@triton.jit
def shift(inputs, window, at, C: tl.constexpr):
    """Drop the oldest token of the window and append the new one."""
    x, _ = inputs
    tl.store(window + at, x[2])
    tl.store(window + C + at, x[1])
    tl.store(window + 2 * C + at, x[0].to(window.dtype.element_ty))


@triton.jit
def l2_norm(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def log_decay(f, a_log, dt_bias, BOUND: tl.constexpr):
    """Log-decay of f [K]: BOUND * sigmoid(exp(a_log) * z), or -exp(a_log) * softplus(z) when BOUND is None."""
    z = f + dt_bias
    rate = tl.exp(a_log)
    if BOUND is None:
        return -rate * (tl.maximum(z, 0.0) + tl.log(1 + tl.exp(-tl.abs(z))))
    else:
        return BOUND * tl.sigmoid(rate * z)


@triton.jit
def read(state, q):
    """Unscaled output [1, V] of a state [K, V] for a normalised query [K]; in two dimensions to keep the layout."""
    return tl.sum(state * q[:, None], axis=0, keep_dims=True)


@triton.jit
def gated_norm(o, gate, weight, D: tl.constexpr, EPS: tl.constexpr):
    """Unscaled o [1, V] of a head, its gate and the norm gain -> gated RMS norm of o * D**-0.5."""
    o = o * D**-0.5
    o = o * tl.rsqrt(tl.sum(o * o, axis=1, keep_dims=True) / D + EPS) * weight
    return o * tl.sigmoid(gate)
