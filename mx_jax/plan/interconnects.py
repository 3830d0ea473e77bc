"""How fast bytes get from device to device: published figures, one direction, one device."""

import dataclasses

from mx_jax.plan.traffic import Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interconnect:
    """A link.

    Attributes:
      name: what the command line calls it.
      rate: bytes a second that one device receives at most.
      source: where the figure is from.
    """

    name: str
    rate: float
    source: str


INTERCONNECTS = {
    own.name: own
    for own in (
        Interconnect(name="nvlink3", rate=300e9, source="A100 data sheet, 600 GB/s both ways"),
        Interconnect(name="nvlink4", rate=450e9, source="H100 data sheet, 900 GB/s both ways"),
        Interconnect(name="nvlink5", rate=900e9, source="B200 data sheet, 1.8 TB/s both ways"),
        Interconnect(name="pcie4", rate=32e9, source="PCI Express 4.0, 16 lanes"),
        Interconnect(name="pcie5", rate=64e9, source="PCI Express 5.0, 16 lanes"),
        Interconnect(name="hdr", rate=25e9, source="InfiniBand HDR, 200 Gb/s, a port a GPU"),
        Interconnect(name="ndr", rate=50e9, source="InfiniBand NDR, 400 Gb/s, a port a GPU"),
        Interconnect(name="xdr", rate=100e9, source="InfiniBand XDR, 800 Gb/s, a port a GPU"),
        Interconnect(name="ethernet100", rate=12.5e9, source="100 Gb/s Ethernet, a port a GPU"),
    )
}


def parse_interconnect(text: str) -> Interconnect:
    """A named link, or one of so many bytes a second.

    Raises:
      ValueError: neither.

    Examples:
      >>> from mx_jax.plan.interconnects import parse_interconnect
      >>> parse_interconnect("ndr").rate, parse_interconnect("2e11").rate
      (50000000000.0, 200000000000.0)
    """
    found = INTERCONNECTS.get(text)
    if found is not None:
        return found
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(
            f"plan: unknown interconnect={text!r}; known: {', '.join(INTERCONNECTS)}, or bytes a "
            "second, as 2e11"
        )
    return Interconnect(name=text, rate=rate, source="as given")


def seconds(rows: tuple[Traffic, ...], links: dict[str, Interconnect], efficiency: float) -> float:
    """Time on the links of the mesh axes that have one, one collective after another."""
    return sum(
        row.bytes / (links[row.movement.axis].rate * efficiency)
        for row in rows
        if row.movement.axis in links
    )
