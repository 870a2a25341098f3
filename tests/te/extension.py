"""`transformer_engine_torch`, Transformer Engine's compiled module, written with torch for a CPU.

Only what unquantized layers, norms and Adam call is here. Any other name of the compiled module can
be looked up, as Transformer Engine does on import, but not called. Signatures are those of the
calls in Transformer Engine 2.11.
"""

import enum

import torch
from torch import Tensor

# Transformer Engine imports these with `*`.
__all__ = ["get_cudnn_version", "layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_fwd"]


class DType(enum.Enum):
    kByte = torch.uint8
    kInt32 = torch.int32
    kInt64 = torch.int64
    kFloat32 = torch.float32
    kFloat16 = torch.float16
    kBFloat16 = torch.bfloat16
    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2
    kFloat4E2M1 = "two in a byte"


class Unavailable:
    """A name of the compiled module without a CPU version."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str) -> "Unavailable":
        if name.startswith("__"):
            raise AttributeError(name)
        value = Unavailable(f"{self.name}.{name}")
        setattr(self, name, value)  # the same object each time: some are keys
        return value

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.name}: no CPU version in {__name__}")


_others = Unavailable("transformer_engine_torch")
layernorm_fwd = _others.layernorm_fwd
layernorm_bwd = _others.layernorm_bwd


def __getattr__(name: str) -> Unavailable:
    return getattr(_others, name)


def get_cudnn_version() -> int:
    return 91900


def get_num_cublas_streams() -> int:
    return 4


# ---------------------------------------------------------------- matrix products


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer,
    out_dtype: DType | None,
    bias: Tensor | None,
    bias_dtype: DType,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_bytes: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap=None,
    comm_type=None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> tuple[Tensor, Tensor | None, None, None]:
    """op(B) @ op(A) in row-major terms; leading dimensions of B are kept.

    bias: added to the product, or with `grad` only the dtype of the gradient that is returned.
    """
    assert quantizer is None and comm_overlap is None and not gelu
    assert alpha == 1.0 and beta == float(accumulate)
    product = _product(A, transa, B, transb)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = B.flatten(0, -2).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    if not transb:
        product = product.unflatten(0, B.shape[:-1])
    if out is not None:
        return _store(product, out, accumulate), bias_grad, None, None
    return product.to(out_dtype.value if out_dtype else B.dtype), bias_grad, None, None


def te_general_grouped_gemm(
    A: list[Tensor],
    transa: bool,
    B: list[Tensor],
    transb: bool,
    out: list[Tensor],
    out_dtype: DType,
    m_splits: list[int],
    bias: list[Tensor],
    bias_dtype: DType,
    single_output: bool,
    gelu_input: list[Tensor],
    grad: bool,
    workspaces: list[Tensor],
    workspace_bytes: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> list[Tensor]:
    """A product per expert, into `out`. `bias`: to add, or with `grad` its gradients to fill."""
    outputs = list(out[0].split(m_splits)) if single_output else out
    for a, b, output, expert_bias in zip(A, B, outputs, bias, strict=True):
        product = _product(a, transa, b, transb)
        if expert_bias.numel() and grad:
            expert_bias.copy_(b.sum(0))
        elif expert_bias.numel():
            product = product + expert_bias
        _store(product, output, accumulate)
    return bias


def _product(A: Tensor, transa: bool, B: Tensor, transb: bool) -> Tensor:
    a = A.flatten(0, -2)
    b = B.flatten(0, -2)
    return (b.t() if transb else b) @ (a.t() if transa else a)


def _store(value: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    return out.add_(value) if accumulate else out.copy_(value)


# ---------------------------------------------------------------- norms


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer,
    out_dtype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """y = x r w with r = 1 / sqrt(mean x² + eps); returns y, no mean, r."""
    assert quantizer is None and not zero_centered_gamma
    x_fp32 = x.float()
    r = torch.rsqrt(x_fp32.square().mean(-1) + eps)
    y = x_fp32 * r.unsqueeze(-1) * weight.float()
    if out is not None:
        return _store(y, out, accumulate=False), None, r
    return y.to(out_dtype.value), None, r


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, r: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    assert not zero_centered_gamma
    scale = r.unsqueeze(-1)
    normed = x.float() * scale
    d_normed = dy.float() * weight.float()
    inner = (d_normed * normed).mean(-1, keepdim=True)
    dx = (d_normed - normed * inner) * scale
    dw = (dy.float() * normed).flatten(0, -2).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


# ---------------------------------------------------------------- lists of tensors


def multi_tensor_l2norm(
    chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    assert not per_tensor
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), torch.empty(0)


def multi_tensor_scale(
    chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], scale: float
) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_adam(
    chunk_size: int,
    overflow: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    adam_w: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """AdamW on lists of gradients, parameters and both moments."""
    assert adam_w and bias_correction
    for grad, param, mean, square in zip(*lists, strict=True):
        grad = grad.float()
        mean.lerp_(grad, 1 - beta1)
        square.lerp_(grad.square(), 1 - beta2)
        denominator = (square / (1 - beta2**step)).sqrt() + eps
        change = mean / (1 - beta1**step) / denominator + weight_decay * param.float()
        param.sub_(lr * change)
