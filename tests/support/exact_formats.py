"""The formats once more, in exact rational arithmetic, one value at a time: slow, short, and sharing no line with `quant`.

Golden vectors are written with it (`python -m tests.support.exact_formats`), and tests compare both. A value is a `Fraction`; the sign
of a zero is kept beside it where a format has one.
"""

from __future__ import annotations

import json
import struct
from fractions import Fraction as F
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "quant" / "golden"
FP32_MAX = F(2**24 - 1) * F(2) ** 104
E2M1 = [F(0), F(1, 2), F(1), F(3, 2), F(2), F(3), F(4), F(6)]


def round_to(x: F, fraction_bits: int, lowest: int) -> F:
    """Nearest value, ties to even, of a float format with that many fraction bits and that smallest normal exponent."""
    if x == 0:
        return x
    exponent = 0
    while abs(x) >= F(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < F(2) ** exponent:
        exponent -= 1
    step = F(2) ** (max(exponent, lowest) - fraction_bits)
    return round(x / step) * step


def fp32(x: F) -> F:
    return round_to(x, 23, -126)


def e4m3(x: F) -> F:
    return min(round_to(x, 3, -6), F(448))


def e4m3_byte(x: F) -> int:
    """Byte of a non-negative E4M3 value."""
    return next(b for b in range(0x7F) if e4m3_value(b) == x)


def e4m3_value(byte: int) -> F:
    exponent, fraction = byte >> 3 & 15, byte & 7
    return F(fraction, 512) if exponent == 0 else F(8 + fraction, 8) * F(2) ** (exponent - 7)


def e2m1_code(x: F) -> int:
    return E2M1.index(min(round_to(abs(x), 1, 0), F(6)))


def nvfp4(x: list[float], g: F | None = None) -> tuple[list[int], list[int], F]:
    """Codes (one a value), scale bytes (one a block of 16) and global scale of `x`."""
    values = [F(v) for v in x]
    if g is None:
        amax = max(map(abs, values))
        g = F(1) if amax == 0 else max(fp32(amax / 2688), F(1, 2**90))
    codes, scales = [], []
    for at in range(0, len(values), 16):
        block = values[at : at + 16]
        amax = max(map(abs, block))
        scale = F(1) if amax == 0 else e4m3(min(max(fp32(amax / fp32(6 * g)), F(1, 512)), F(448)))
        divisor = fp32(scale * g)
        scales.append(e4m3_byte(scale))
        codes += [e2m1_code(fp32(v / divisor)) | (8 if v < 0 else 0) for v in block]
    return codes, scales, g


def mxfp8(x: list[float]) -> tuple[list[int], list[int]]:
    """Code bytes and exponent bytes (one a block of 32) of `x`."""
    codes, exponents = [], []
    for at in range(0, len(x), 32):
        block = x[at : at + 32]
        amax = max(abs(F(v)) for v in block)
        exponent = -127
        while amax > 448 * F(2) ** exponent:
            exponent += 1
        exponents.append(exponent + 127)
        for v in block:
            sign = 0x80 if struct.pack(">f", v)[0] >= 0x80 else 0
            codes.append(e4m3_byte(e4m3(abs(F(v)) / F(2) ** exponent)) | sign)
    return codes, exponents


def static_activations(x: list[float], input_scale: F) -> tuple[list[int], list[int], list[F]]:
    """Codes, scale bytes and values under a static input scale: see `quant.activations`."""
    encode = fp32(1 / input_scale)
    codes, scales, out = [], [], []
    for at in range(0, len(x), 16):
        block = [F(v) for v in x[at : at + 16]]
        s = e4m3(min(fp32(encode * fp32(max(map(abs, block)) * fp32(F(1, 6)))), F(448)))
        product = fp32(s * fp32(1 / encode))
        factor = fp32(1 / product) if product else fp32(F(1, 10**8))
        scales.append(e4m3_byte(s))
        block_codes = [e2m1_code(fp32(v * factor)) | (8 if v < 0 and fp32(v * factor) else 0) for v in block]
        codes += block_codes
        out += [fp32((-1 if c & 8 else 1) * E2M1[c & 7] * fp32(s / encode)) for c in block_codes]
    return codes, scales, out


def token_activations(x: list[float]) -> tuple[list[int], list[int], F]:
    """Codes, scale bytes and token scale of one token: see `quant.activations`."""
    values = [F(v) for v in x]
    row = max(map(abs, values))
    encode = min(fp32(F(2688) / row), FP32_MAX) if row else FP32_MAX
    decode = fp32(1 / encode) if row else F(0)
    codes, scales = [], []
    for at in range(0, len(values), 16):
        block = values[at : at + 16]
        amax = max(map(abs, block))
        s = e4m3(min(fp32(amax * fp32(encode * fp32(F(1, 6)))), F(448)))
        product = fp32(s * fp32(1 / encode))
        factor = F(0) if amax == 0 else min(fp32(1 / product), FP32_MAX) if product else FP32_MAX
        scales.append(e4m3_byte(s))
        codes += [e2m1_code(fp32(v * factor)) | (8 if v < 0 and fp32(v * factor) else 0) for v in block]
    return codes, scales, decode


def _up(x: float, steps: int = 1) -> float:
    """The fp32 value `steps` above x > 0."""
    return struct.unpack("<f", struct.pack("<i", struct.unpack("<i", struct.pack("<f", x))[0] + steps))[0]


def _pad(*values: float, to: int) -> list[float]:
    return list(values) + [0.0] * (-len(values) % to)


MIDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
TINY = 2.0**-149


def nvfp4_cases() -> dict[str, tuple[list[float], float | None]]:
    """Rule to (input, global scale or None)."""
    ramp = [(-1) ** i * (i + 0.5) for i in range(16)]
    return {
        "ties": (_pad(6.0, *MIDS, *(-m for m in MIDS), to=16), 1.0),
        "above ties": (_pad(6.0, *map(_up, MIDS), *(-_up(m) for m in MIDS), to=16), 1.0),
        "below ties": (_pad(6.0, *(_up(m, -1) for m in MIDS), *(-_up(m, -1) for m in MIDS), to=16), 1.0),
        "every value": (_pad(*map(float, E2M1), *(-float(v) for v in E2M1[1:]), to=16), 1.0),
        "zero block": ([0.0] * 16 + _pad(3.0, -1.0, to=16), None),
        "zero tensor": ([0.0] * 32, None),
        "negative zero": (_pad(6.0, -0.0, -0.2, 0.2, to=16) + [-0.0] * 16, 1.0),
        "scale that would round to 0": (_pad(2.0**-10, 2.0**-11, -(2.0**-12), to=16) + _pad(6 * 2.0**-10, to=16), 1.0),
        "subnormal scales": ([v for n in (1, 1.5, 2.5, 3.5, 6.5, 7.5) for v in _pad(6 * n * 2.0**-9, n * 2.0**-9, to=16)], 1.0),
        "ties of the scale": ([v for n in (1.0625, 1.1875, 17.0, 19.0) for v in _pad(6 * n, -n, 3 * n, to=16)], 1.0),
        "saturating scale": (_pad(1e6, 2688.0, 1344.0, -1.0, to=16) + _pad(_up(2688.0), 448.0, to=16), 1.0),
        "amax 448 * 2^k": ([448.0 * 2.0**k for k in range(-12, 4)], None),
        "amax 1.75 * 2^k": ([1.75 * 2.0**k * (-1) ** k for k in range(-12, 4)], None),
        "amax 448 * 2^k, one a block": ([v for k in (-9, -3, 0, 2) for v in _pad(448.0 * 2.0**k, 2.0**k, -100.0 * 2.0**k, to=16)], None),
        "ramp": (ramp, None),
        "heavy tail": ([float(7**i % 1009) * 1e-3 for i in range(15)] + [30000.0] + [1e-3 * v for v in ramp], None),
        "tiny global scale": (_pad(1e-24, -3e-25, 1e-27, to=16), None),
        "subnormal input": (_pad(TINY, -TINY, 100 * TINY, 2.0**-127, to=16), None),
        "subnormal beside normal": (_pad(1.0, -TINY, TINY, 2.0**-130, to=16), None),
        "largest fp32": (_pad(float(FP32_MAX), -1e38, 3e37, to=16), None),
        "smallest given scale": (_pad(2.0**-87, -(2.0**-89), to=16), 2.0**-90),
        # One block a case; reciprocals, or amax / g / 6 in the place of amax / (6 g), give another byte or code.
        "scale next to half-way": (_pad(float.fromhex("0x1.3b8250p+4"), 1.0, -2.0, to=16), float.fromhex("0x1.d0327ap+0")),
        "scale next to half-way, again": (_pad(float.fromhex("0x1.3b7a7ep+3"), 1.0, -2.0, to=16), float.fromhex("0x1.6238b2p+0")),
        "code next to half-way": (
            _pad(6 * float.fromhex("0x1.7833fcp+0"), float.fromhex("0x1.d640fcp+0"), -float.fromhex("0x1.d640fcp+0"), to=16),
            float.fromhex("0x1.7833fcp+0"),
        ),
        "code next to half-way, again": (
            _pad(6 * float.fromhex("0x1.9602e8p+0"), float.fromhex("0x1.fb83a4p+0"), -float.fromhex("0x1.fb83a4p+0"), to=16),
            float.fromhex("0x1.9602e8p+0"),
        ),
        "largest given scale": (_pad(float(FP32_MAX), -(2.0**120), to=16), 2.0**117),
    }


def mxfp8_cases() -> dict[str, list[float]]:
    """Rule to input."""
    return {
        "amax 448 * 2^k": [v for k in (-120, -20, -1, 0, 1, 20, 119) for v in _pad(448.0 * 2.0**k, -(2.0**k), 3.3125 * 2.0**k, to=32)],
        "just above 448 * 2^k": [v for k in (-120, -1, 0, 1, 119) for v in _pad(_up(448.0 * 2.0**k), -(2.0**k), to=32)],
        "just below 448 * 2^k": [v for k in (-120, -1, 0, 1, 119) for v in _pad(_up(448.0 * 2.0**k, -1), -(2.0**k), to=32)],
        "amax 1.75 * 2^k": [v for k in (-20, 0, 3) for v in _pad(1.75 * 2.0**k, -0.3 * 2.0**k, to=32)],
        "faults of other packers": [v for a in (957.0, 4.8046875, 150.0, 896.0, 2.7, 5.5, 1.2) for v in _pad(a, -a / 3, to=32)],
        "zero block": [0.0] * 32 + _pad(448.0, to=32),
        "negative zero": _pad(448.0, -0.0, -1e-9, 1e-9, to=32) + [-0.0] * 32,
        "ties of E4M3": _pad(448.0, 1.0625, 1.1875, -2.125, 2.375, 17.0, 19.0, 232.0, to=32),
        "ties of subnormal E4M3": _pad(448.0, *(n * 2.0**-10 for n in range(1, 18)), to=32),
        "tiny": _pad(2.0**-119, 2.0**-127, -(2.0**-130), to=32) + _pad(2.0**-127, TINY, -TINY, to=32),
        "subnormal input": _pad(TINY, -3 * TINY, 2.0**-133, to=32),
        "largest fp32": _pad(float(FP32_MAX), -1e38, 1.0, to=32),
        "heavy tail": [float(7**i % 1009) * 1e-3 for i in range(31)] + [-30000.0],
    }


def activation_cases() -> dict[str, tuple[list[float], float]]:
    """Rule to (one token, static input scale)."""
    ramp = [(-1) ** i * (i + 0.3) for i in range(32)]
    return {
        "ramp": (ramp, 0.0123),
        "zero block": ([0.0] * 16 + ramp[:16], 0.01),
        "zero token": ([0.0] * 32, 0.01),
        "scale that rounds to 0": (_pad(1e-6, -1e-7, to=16) + _pad(100.0, -1.0, to=16), 0.04),
        "saturating scale": (_pad(1e6, 10.0, -3.0, to=16), 0.001),
        "ties": (_pad(6.0, *MIDS, *(-m for m in MIDS), to=16), 1.0),
        "input scale 1": (ramp, 1.0),
        "negative zero": (_pad(6.0, -0.0, -0.2, to=16), 1.0),
        "heavy tail": ([float(7**i % 1009) * 1e-3 for i in range(31)] + [-30000.0], 30000 / 2688),
        # Another order of the three factors gives another scale byte: two static cases, then two per token.
        "static scale next to half-way": (_pad(float.fromhex("0x1.0cdd14p-7"), to=16), float.fromhex("0x1.f2c2fp-8")),
        "static scale next to half-way, again": (_pad(float.fromhex("0x1.57227ep+0"), to=16), float.fromhex("0x1.f8d788p-8")),
        "token scale next to half-way": (_token("0x1.a5b91ep-10", "0x1.00b378p+0"), 1.0),
        "token scale next to half-way, again": (_token("0x1.e37cf8p-7", "0x1.644124p+0"), 1.0),
    }


def _token(block_amax: str, row_amax: str) -> list[float]:
    return _pad(float.fromhex(block_amax), to=16) + _pad(float.fromhex(row_amax), to=16)


def _hex(values: list[float]) -> str:
    return struct.pack(f">{len(values)}f", *values).hex()


def main() -> None:
    """Write the golden files: inputs and scales as big-endian fp32 in hex, codes and scale bytes in hex."""
    files: dict[str, dict] = {"nvfp4": {}, "mxfp8": {}, "activations": {}}
    for rule, (x, g) in nvfp4_cases().items():
        x = list(struct.unpack(f"{len(x)}f", struct.pack(f"{len(x)}f", *x)))
        codes, scales, scale = nvfp4(x, None if g is None else F(g))
        files["nvfp4"][rule] = {
            "x": _hex(x),
            "given_scale": None if g is None else _hex([g]),
            "codes": bytes(codes).hex(),
            "block_scales": bytes(scales).hex(),
            "global_scale": _hex([float(scale)]),
        }
    for rule, x in mxfp8_cases().items():
        x = list(struct.unpack(f"{len(x)}f", struct.pack(f"{len(x)}f", *x)))
        codes, exponents = mxfp8(x)
        files["mxfp8"][rule] = {"x": _hex(x), "codes": bytes(codes).hex(), "exponents": bytes(exponents).hex()}
    for rule, (x, scale) in activation_cases().items():
        x = list(struct.unpack(f"{len(x)}f", struct.pack(f"{len(x)}f", *x)))
        (scale,) = struct.unpack("f", struct.pack("f", scale))
        codes, scales, values = static_activations(x, F(scale))
        token_codes, token_scales, decode = token_activations(x)
        files["activations"][rule] = {
            "x": _hex(x),
            "input_scale": _hex([scale]),
            "codes": bytes(codes).hex(),
            "block_scales": bytes(scales).hex(),
            "values": _hex([float(v) for v in values]),
            "token_codes": bytes(token_codes).hex(),
            "token_block_scales": bytes(token_scales).hex(),
            "token_scale": _hex([float(decode)]),
        }
    # What a re-rounded read gives for E2M1 code c and E4M3 scale byte b, as E4M3 byte, row b: products saturate at 448.
    rounded = [[e4m3_byte(e4m3(E2M1[c] * e4m3_value(b))) for c in range(8)] for b in range(0x7F)]
    files["kv"] = {"rounded": [bytes(row).hex() for row in rounded]}
    for name, content in files.items():
        (GOLDEN / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
