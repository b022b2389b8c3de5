"""Which addresses requests to URLs of clients may use."""

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# IANA's special-purpose registries, by the description for error messages.
_REFUSED = {
    "an unspecified address": ("0.0.0.0/8", "::/128"),
    "a private address": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "64:ff9b:1::/48", "fc00::/7", "fec0::/10"),
    "a carrier's private address": ("100.64.0.0/10",),
    "a loopback address": ("127.0.0.0/8", "::1/128"),
    "a cloud's metadata address": ("168.63.129.16/32",),  # Azure's, outside the reserved ranges
    "a cluster's service address": ("34.118.224.0/20",),  # GKE's default range of Services
    "a link-local address": ("169.254.0.0/16", "fe80::/10"),
    "a multicast address": ("224.0.0.0/4", "ff00::/8"),
    "a reserved address": (
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
        *("240.0.0.0/4", "2001::/23", "2001:db8::/32", "3fff::/20"),  # 2001::/23: Teredo and other experiments
    ),
}
_REFUSED_NETWORKS = [(ipaddress.ip_network(cidr), kind) for kind, cidrs in _REFUSED.items() for cidr in cidrs]
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def refusal(address: str, allowed: Sequence[Network] = (), refused: Sequence[Network] = ()) -> str | None:
    """Return why `address` is not allowed, or None if it is.

    The operator opens the networks `allowed`, and closes those `refused`. An IPv4 address embedded in an IPv6 one
    (mapped, 6to4, NAT64) is checked too.
    """
    try:
        parsed: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "not an address"
    if any(parsed in network for network in refused):
        return "in a network that the operator refuses"
    if any(parsed in network for network in allowed):
        return None
    if isinstance(parsed, ipaddress.IPv6Address):
        nat64 = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF) if parsed in _NAT64 else None
        if embedded := nat64 or parsed.ipv4_mapped or parsed.sixtofour:
            return refusal(str(embedded), allowed, refused)
    kind = next((kind for network, kind in _REFUSED_NETWORKS if parsed in network), None)
    return kind or (None if parsed.version == 4 or parsed in _GLOBAL_V6 else "a reserved address")


def is_within(address: str, networks: Sequence[Network]) -> bool:
    """Return whether one of the networks has the address."""
    return any(ipaddress.ip_address(address.partition("%")[0]) in network for network in networks)
