"""Days, energy and money of a training run, from its FLOPs and what a device really does per second.

    days     FLOPs / (devices · peak · MFU) / 86,400          energy   devices · watts · overhead · seconds
    money    devices · hours · price of a device-hour

overhead (power usage effectiveness, PUE): what cooling and conversion add, 1.1 in a good data centre.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bill:
    """days of wall clock, device-hours, megawatt-hours and money in the price's currency."""

    days: float
    device_hours: float
    energy_mwh: float
    money: float


def bill(
    flops: float, devices: int, peak_flops: float, mfu: float, *, watts: float, pue: float, price_per_hour: float
) -> Bill:
    """Of `flops` model FLOPs. mfu: the useful share of the peak, failures and restarts included."""
    for name, value in {"flops": flops, "devices": devices, "peak_flops": peak_flops, "watts": watts}.items():
        if not value > 0:
            raise ValueError(f"{name} {value} must be above 0.")
    if not 0 < mfu <= 1 or pue < 1 or price_per_hour < 0:
        raise ValueError(
            f"mfu {mfu} lies in 0 .. 1, pue {pue} is 1 or more, price_per_hour {price_per_hour} at least 0."
        )
    seconds = flops / (devices * peak_flops * mfu)
    hours = devices * seconds / 3600
    return Bill(seconds / 86400, hours, hours * watts * pue / 1e6, hours * price_per_hour)
