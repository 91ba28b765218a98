"""The codes of formats in planes, read byte by byte as `lean.quant.formats` lays them out; shares no code with it."""

PLANES = {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}  # bits of each plane, by bits of a code


def code_at(row, dim, j, bits):
    """The code of dim j, two's complement, from a row's bytes."""
    code, start, unit = 0, 0, j // 32 * 32
    width = min(32, dim - unit)
    for plane in PLANES[bits]:
        nbytes = width * plane // 8
        place = start + unit * plane // 8 + (j - unit) % nbytes
        code = code << plane | row[place] >> ((j - unit) // nbytes * plane) & (1 << plane) - 1
        start += dim * plane // 8
    return code
