"""KIT-6 under a sanitizer: every length, each buffer at the end of its own allocation. test_sanitizer.py runs it."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else the caching allocator hides an overrun

import torch

import serving_conv

LENGTHS = [*range(1, 11), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, *range(1023, 1028), 4099]


def end_of_allocation(host: torch.Tensor, *, unit: int = 256) -> torch.Tensor:
    """A device copy whose last byte is the last of its allocation, which torch rounds up to `unit` bytes."""
    size = host.numel() * host.element_size()
    whole = torch.zeros(-(-size // unit) * unit, dtype=torch.uint8, device="cuda")
    return whole[whole.numel() - size :].view(host.dtype).view(host.shape).copy_(host)


def main() -> None:
    """Prefill and update for every length, in two types, odd and even channels, history on and off."""
    for channels, dtype in ((65, torch.float32), (128, torch.bfloat16)):
        weight = end_of_allocation(torch.randn(channels, 4).to(dtype))
        for length in LENGTHS:
            lengths = [length, 1, 0, 3]
            offsets = end_of_allocation(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32))
            x = end_of_allocation(torch.randn(sum(lengths), channels).to(dtype))
            out = end_of_allocation(torch.zeros(sum(lengths), channels).to(dtype))
            pool = end_of_allocation(torch.zeros(4, 6, channels).to(dtype)).transpose(1, 2)
            slots = end_of_allocation(torch.tensor([2, 0, 1, 3], dtype=torch.int32))
            flags = end_of_allocation(torch.tensor([True, False, True, True]))
            counts = end_of_allocation(torch.tensor([1, 2, 3, 4], dtype=torch.int32))
            for accepted in (None, counts):
                serving_conv.causal_conv1d_fn(
                    x, weight, pool, offsets, slots, flags, num_accepted_tokens=accepted, out=out
                )
                serving_conv.causal_conv1d_update(
                    x, weight, pool, slots, cu_seqlens=offsets, num_accepted_tokens=accepted, out=out
                )
            if length <= 4:
                serving_conv.causal_conv1d_update(x[:4], weight, pool, slots, out=out[:4])
    torch.cuda.synchronize()
    print("all lengths ran")


if __name__ == "__main__":
    main()
