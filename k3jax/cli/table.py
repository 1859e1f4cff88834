"""Plain text tables and byte counts for the terminal."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns; the first row is the header, `right` lists right-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * w for w in widths), *map(line, rows[1:])])


def human_bytes(n: float) -> str:
    """Decimal units, as GPU memory is sold: 1,560,860,324,864 -> "1.56 TB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
    return f"{n:.2f} TB"


def gigabytes(flag: str, value: float) -> int:
    """Bytes of a flag given in GB; ValueError unless it is from 0 to a petabyte."""
    if not 0 <= value <= 1e6:
        raise ValueError(f"{flag} is {value}, allowed is 0 to 1000000 GB; give a number in that range")
    return int(value * 1e9)
