"""How a copy of a tensor lies in the memory of another device, from shape and strides alone."""


def gapped_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Return strides for a copy of a slice: small gaps where the slice has large ones; None if it has no gaps.

        x[:, :3] of x (2, 9, 16)      rows xxx.........|xxx.........      strides (144, 16, 1)
        its copy                      rows xxx.xxx                        strides (64, 16, 1), not (48, 16, 1)

    Kernels choose how to compute by what is contiguous and how rows are aligned (to 64 bytes), and other choices give
    other bits. So the copy of a slice has gaps where the slice has, at the same alignment, but as small as can be.
    Dimensions of one element come in the same place as before: torch tells channels last from channels first by them.
    """
    dims = sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: strides[d])
    if not dims or strides[dims[0]] != 1:
        return None
    line = max(1, 64 // itemsize)
    small = [1] * len(shape)
    filled, old_filled, gaps = 1, 1, False  # elements spanned so far, in the copy and in the slice
    for dim in dims:
        stride = strides[dim]
        if stride < old_filled:
            return None  # overlapping: nothing to imitate
        if stride > old_filled:
            gaps = True
            filled += 1 + (stride - filled - 1) % line
        small[dim] = filled
        filled, old_filled = filled * shape[dim], stride * shape[dim]
    for single in (d for d, size in enumerate(shape) if size == 1):
        stride = small[single] = strides[single]
        for dim in dims:
            if strides[dim] <= stride:
                small[single] = small[dim] * (shape[dim] if stride >= strides[dim] * shape[dim] else 1)
    return tuple(small) if gaps else None
